"""The options of `tbe-export manifests`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serving.bundle.lineage import deltas_url
from serving.errors import ConfigurationError
from serving.files import is_url

# By digest, such as registry.example/team/tbe-serving@sha256:…, with a tag or without.
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
# Namespaces are named by DNS labels, claims by labels joined by dots.
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """How the pods of a fleet are run, and how many there are.

    Attributes:
        image: of the server, by digest.
        claim: the PersistentVolumeClaim with the repository. Either this or `store` is set.
        store: the URL of the repository in a store, from which each pod downloads its bundles to its node's disk.
        copy: whether each pod copies its bundles from the claim to its node's disk.
        trusted_keys: a file of public keys. One of them must have signed the bundles. None: no signature is needed.
        insecure: whether TLS is off.
        metrics_from: the namespace whose pods may read metrics.
        deltas_claim: the PersistentVolumeClaim with the deltas of live models. None: no model takes deltas, or they
            are in the store.
        routers: the minimum number of pods of the model that clients call.
        most_routers: the maximum number of pods of that model.
        scale_on_queue_ms: the mean time in ms that requests may wait before the autoscaler adds pods of that model.
            None: it scales by CPU alone. A router waits more than it computes.
        replicas: the number of pods of each host.
        replicas_of: the number of pods of single hosts, by the host's number. They override `replicas`.

    Raises:
        ConfigurationError: a name is invalid in Kubernetes, an image has no digest, a number is not above 0, or
            `most_routers` is below `routers`.
    """

    image: str
    claim: str | None = None
    store: str | None = None
    copy: bool = False
    trusted_keys: Path | None = None
    insecure: bool = False
    metrics_from: str = "monitoring"
    deltas_claim: str | None = None
    routers: int = 2
    most_routers: int = 8
    scale_on_queue_ms: int | None = None
    replicas: int = 2
    replicas_of: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.claim is None) == (self.store is None):
            raise ConfigurationError("--claim, --store: expected one of them: where pods have the repository from")
        if self.store is not None and (self.copy or not is_url(self.store)):
            raise ConfigurationError(f"--store: expected s3://… or gs://…, without --copy, got {self.store!r}")
        if not _IMAGE.fullmatch(self.image):
            by_digest = "by digest, such as registry.example/tbe-serving@sha256:…, for a tag can be moved"
            raise ConfigurationError(f"--image: expected an image {by_digest}, got {self.image!r}")
        for option, claim in (("--claim", self.claim), ("--deltas-claim", self.deltas_claim)):
            if claim is not None and not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", claim):
                raise ConfigurationError(f"{option}: expected the name of a PersistentVolumeClaim, got {claim!r}")
        if not re.fullmatch(_LABEL, self.metrics_from):
            raise ConfigurationError(f"--metrics-from: expected the name of a namespace, got {self.metrics_from!r}")
        numbers = {"--routers": self.routers, "--replicas": self.replicas}
        numbers |= {f"--replicas-of {host}": number for host, number in self.replicas_of.items()}
        numbers |= {} if self.scale_on_queue_ms is None else {"--scale-on-queue-ms": self.scale_on_queue_ms}
        for option, number in numbers.items():
            if number < 1:
                raise ConfigurationError(f"{option}: expected at least 1, got {number}")
        if self.most_routers < self.routers:
            raise ConfigurationError(
                f"--most-routers: expected at least --routers, {self.routers}, got {self.most_routers}"
            )

    @property
    def deltas(self) -> str:
        """The URL of the deltas, of a repository in a store."""
        return deltas_url(str(self.store))
