"""What whoever deploys a bundle chooses for its pods."""

import re
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigurationError

METRICS_FROM = "monitoring"
# Such as registry.example/team/tbe-serving@sha256:…, with a tag or without.
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}")
# Names of namespaces are DNS labels, those of claims are labels joined by dots.
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOptions:
    """What pods have in common.

    Attributes:
        image: of the server, by digest.
        claim: the PersistentVolumeClaim with the repository.
        copy: whether each pod copies its own bundles to the disk of its node first. Otherwise it mounts them.
        trusted_keys: a file of public keys. One of them must have signed what is served. None: anybody may have.
        insecure: no TLS.
        metrics_from: the namespace whose pods may read metrics.

    Raises:
        ConfigurationError: Kubernetes does not take a name, or an image has no digest.
    """

    image: str
    claim: str
    copy: bool = False
    trusted_keys: Path | None = None
    insecure: bool = False
    metrics_from: str = METRICS_FROM

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise ConfigurationError(
                f"--image: expected an image by digest, such as registry.example/tbe-serving@sha256:…, for a tag can "
                f"be moved, got {self.image!r}"
            )
        if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", self.claim):
            raise ConfigurationError(f"--claim: expected the name of a PersistentVolumeClaim, got {self.claim!r}")
        if not re.fullmatch(_LABEL, self.metrics_from):
            raise ConfigurationError(f"--metrics-from: expected the name of a namespace, got {self.metrics_from!r}")
