"""What is published, and the repository of each server: that of a host has the host's model alone."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from examples.hosts.model import HOSTS, MODEL, export
from export.publish.published import release


@dataclass(frozen=True)
class Repositories:
    """Folders under one folder."""

    folder: Path

    @property
    def hosts(self) -> tuple[Path, ...]:
        """The model of each host, in the repository of its server."""
        return tuple(self.folder / f"host-{host}" / f"{MODEL}-host-{host}" for host in range(HOSTS))

    @property
    def router(self) -> Path:
        """The router's model, in the repository of its server."""
        return self.folder / "router" / MODEL

    def export(self, version: int) -> None:
        """Publish a version of all models."""
        export(self.folder / "published", version)

    def distribute(self, version: int) -> None:
        """Copy a version to the servers. The first one comes with the settings of its model."""
        for model in (*self.hosts, self.router):
            published = self.folder / "published" / model.name
            if not model.exists():
                shutil.copytree(published, model, ignore=shutil.ignore_patterns("[0-9]*"))
            shutil.copytree(published / str(version), model / str(version))

    def release_on_hosts(self, *versions: int) -> None:
        """Have the hosts serve these versions, as `tbe-export release` does."""
        for model in self.hosts:
            release(model, versions)

    def release_on_router(self, version: int) -> None:
        """Have the router serve this version."""
        release(self.router, [version])


def weights_bytes(model: Path) -> int:
    """The size of the weights of a model's version 1."""
    return sum(path.stat().st_size for path in (model / "1").glob("weights.*.bin"))
