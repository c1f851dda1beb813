"""Locks on bundles: a bundle that a process has open is not removed."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.bundle.manifest import MANIFEST
from serving.errors import BundleError
from serving.files import open_file


def hold(path: Path) -> int:
    """Hold a shared lock on the bundle at `path`, which marks it as in use.

    Returns:
        A file descriptor. The bundle is in use until the descriptor is closed, or the process ends.

    Raises:
        BundleError: there is no bundle at `path`.
    """
    try:
        with open_file(path / MANIFEST) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise BundleError(f"{path / MANIFEST}: cannot be read: {error.strerror}: is {path} a bundle?") from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def in_use(path: Path) -> Iterator[bool]:
    """Whether a process holds the bundle at `path`. If none does, none can begin to hold it inside the block."""
    try:
        file = open_file(path / MANIFEST)
    except OSError as error:
        # A bundle that does not exist is not in use. One that this process may not read can be.
        yield isinstance(error, PermissionError)
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield True
        else:
            yield False
