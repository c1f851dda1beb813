"""Open files that somebody else may have put there: never wait for one, never follow a link unasked."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

# Bytes. A manifest, a settings file, a signature or a file of keys is not larger.
SMALL = 64 << 20


def open_file(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: it may be a symbolic link, as a file that the operator names may be. Its folders always may be.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    # Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(error.errno, "expected a file, got a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
    return open(descriptor, "rb")


def read_file(path: Path, most_bytes: int = SMALL, *, follow: bool = False) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: as `open_file`, or the file is larger than `most_bytes`.
    """
    with open_file(path, follow=follow) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, got more", str(path))
    return content
