"""Bundles on several hosts: a router's bundle, and one bundle for each host of its plan.

The router's plan has all ranks. Its own rank comes first, with a file of weights. Each other rank is a host, without
a file there: a bundle of its own holds its rows. That is an ordinary bundle, in which a shard is a table, and a
segment (one feature over one shard) is a feature. All its features are sums.
"""

import enum
import re
from pathlib import Path

from serving.files.strict import Strict

# The host of the router's own rank. All others count from 0.
ROUTER = -1
# The only file of weights in a bundle of one rank.
FIRST_WEIGHTS = "weights.0.bin"

# Triton's versions are int64.
MOST_VERSION = 2**63 - 1
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class IdDtype(enum.Enum):
    """The dtype of `values` in a request, by its KServe name."""

    INT64 = "INT64"
    INT32 = "INT32"


class HostBundle(Strict, frozen=True):
    """The bundle that answers for a host of a router's plan. No other version of its model does.

    Attributes:
        host: number of the host in the plan.
        model: name of the model.
        version: of the model.
        manifest: SHA-256, in hex, of its manifest.json.
    """

    host: int
    model: str
    version: int
    manifest: str

    @property
    def is_possible(self) -> bool:
        """Whether there can be such a bundle."""
        is_digest = _SHA256.fullmatch(self.manifest) is not None
        return is_model_name(self.model) and 1 <= self.version <= MOST_VERSION and is_digest

    @property
    def router(self) -> str | None:
        """The name of the router's model, which that of the host's is made of. None: it is not."""
        router = self.model.removesuffix(host_model("", self.host))
        return router if is_model_name(router) and router != self.model else None


class Part(Strict, frozen=True):
    """What a host's bundle is a part of.

    Attributes:
        model: name of the router's model.
        host: number of the host in the router's plan.
        plan: `Manifest.layout` of the router's manifest, in hex.
    """

    model: str
    host: int
    plan: str

    @property
    def is_possible(self) -> bool:
        """Whether there can be such a part."""
        return is_model_name(self.model) and self.host >= 0 and _SHA256.fullmatch(self.plan) is not None

    @property
    def text(self) -> str:
        """All of it that makes partial sums mean something, as a router asks for it."""
        return part_text(self.host, self.plan)


def is_model_name(text: str) -> bool:
    """Whether a model may be called so: it names a folder, and goes into paths."""
    return _MODEL_NAME.fullmatch(text) is not None


def part_text(host: int, plan: str) -> str:
    """What a request to a host asks its bundle to be a part of: `PLAN/HOST`.

    Args:
        host: number of the host.
        plan: `Manifest.layout` of the router's manifest, in hex.
    """
    return f"{plan}/{host}"


def host_model(router: str, host: int) -> str:
    """The name of the model that answers for a host.

    Args:
        router: name of the router's model.
        host: number of the host.
    """
    return f"{router}-host-{host}"


def is_host_model(name: str, router: str) -> bool:
    """Whether `host_model` gives this name to a host of a router."""
    return re.fullmatch(f"{re.escape(router)}-host-[0-9]+", name) is not None


def path_of(router: Path, host: HostBundle) -> Path:
    """Where the bundle of a host lies if it is in the router's repository.

    Args:
        router: the router's bundle, <repository>/<model>/<version>.
        host: an entry of its manifest.
    """
    return router.absolute().parent.parent / host.model / str(host.version)
