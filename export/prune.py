"""Remove old versions of a model, never one that is in use."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from export.errors import PublishError
from serving.bundle import in_use, versions
from serving.config_file import read_config, settings_of
from serving.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a version: `kept` says why it stays; None says that it was removed."""

    version: int
    kept: str | None


def prune(model: Path, keep: int, *, dry_run: bool = False) -> Iterator[Fate]:
    """Remove the versions of a model but the newest `keep`, those that a process has open, and the configured one.

    Args:
        model: `<repository>/<name>`.
        keep: how many of the newest stay whatever happens, 1 or more.
        dry_run: only say what would be removed.

    Yields:
        The fate of each version, newest first. A version vanishes at once, then its files are removed.

    Raises:
        PublishError: there is no such model, `keep` is less than 1, or a version cannot be removed.
    """
    if keep < 1:
        raise PublishError(f"keep: expected 1 or more, got {keep}")
    try:
        configured = settings_of(read_config(model)).version
    except ConfigurationError as error:
        raise PublishError(str(error)) from error
    for position, version in enumerate(reversed(versions(model))):
        path = model / str(version)
        if position < keep:
            yield Fate(version, f"among the newest {keep}")
        elif version == configured:
            yield Fate(version, "config.pbtxt says to serve it")
        elif dry_run:
            with in_use(path) as used:
                yield Fate(version, "in use" if used else None)
        else:
            yield Fate(version, None if _remove(path) else "in use")


def _remove(version: Path) -> bool:
    """Whether the version was removed; not if a process has it open."""
    repository = version.parent.parent.absolute()
    with in_use(version) as used:
        if used:
            return False
        try:
            # As for drafts: Triton takes every folder inside the repository for a model.
            trash = Path(tempfile.mkdtemp(dir=repository.parent, prefix=f".{repository.name}.draft-"))
            version.rename(trash / "version")
        except OSError as error:
            raise PublishError(f"{version}: cannot be removed: {error.strerror}") from error
    shutil.rmtree(trash, ignore_errors=True)  # what is left of it the next export removes
    return True
