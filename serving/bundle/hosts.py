"""Bundles on several hosts: a router's bundle, and one bundle for each host of its plan.

The router's plan has all ranks. The first is its own, with a weights file. Each other rank is a host, and has no file
in the router's bundle: the host has a bundle of its own with its rows. That is an ordinary bundle. A shard of the
router's plan is a table in it, and a segment (one feature over one shard) is a feature. Its pooling is always SUM.
"""

import enum
import re
from pathlib import Path

from serving.files.reading import Strict

# The host of the router's own rank. All others count from 0.
ROUTER = -1
# The only weights file of a bundle with one rank.
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
    """The bundle of a host in a router's plan. The router accepts no other version of that model.

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
        """Whether model, version and digest have valid forms."""
        is_digest = _SHA256.fullmatch(self.manifest) is not None
        return is_model_name(self.model) and 1 <= self.version <= MOST_VERSION and is_digest

    @property
    def router(self) -> str | None:
        """The name of the router's model, derived from this one. None: this is no name that `host_model` gives."""
        router = self.model.removesuffix(host_model("", self.host))
        return router if is_model_name(router) and router != self.model else None


class Part(Strict, frozen=True):
    """The router's plan that a host's bundle is a part of.

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
        """Whether model, host and plan have valid forms."""
        return is_model_name(self.model) and self.host >= 0 and _SHA256.fullmatch(self.plan) is not None

    @property
    def text(self) -> str:
        """The plan and the host, as a router's request names them: partial sums of another plan mean nothing."""
        return part_text(self.host, self.plan)


def is_model_name(text: str) -> bool:
    """Whether `text` may be the name of a model. It names a folder, and is part of paths."""
    return _MODEL_NAME.fullmatch(text) is not None


def part_text(host: int, plan: str) -> str:
    """The text `PLAN/HOST`. A request to a host names by it the plan that the host's bundle has to be a part of.

    Args:
        host: number of the host.
        plan: `Manifest.layout` of the router's manifest, in hex.
    """
    return f"{plan}/{host}"


def host_model(router: str, host: int) -> str:
    """The name of the model of a host.

    Args:
        router: name of the router's model.
        host: number of the host.
    """
    return f"{router}-host-{host}"


def is_host_model(name: str, router: str) -> bool:
    """Whether `host_model` gives this name to a host of a router."""
    return re.fullmatch(f"{re.escape(router)}-host-[0-9]+", name) is not None


def path_of(router: Path, host: HostBundle) -> Path:
    """The path of a host's bundle if it is in the router's repository.

    Args:
        router: the router's bundle, <repository>/<model>/<version>.
        host: an entry of its manifest.
    """
    return router.absolute().parent.parent / host.model / str(host.version)
