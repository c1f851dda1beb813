"""Files that somebody else may have put there: opened without waiting for them, and without being led elsewhere."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

# Most bytes of a file that is read whole: manifests, settings, signatures, keys.
SMALL = 64 << 20


def open_file(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a file for reading; never a pipe, a device, a socket or a folder.

    Args:
        path: the file.
        follow: it may be a symbolic link, such as what the operator names. Folders on the way always may be.

    Raises:
        OSError: it cannot be opened, or is something else than a file.
    """
    # A pipe that nobody writes to would be waited for.
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
    """The bytes of a file that is not to be larger than `most_bytes`.

    Raises:
        OSError: as `open_file`, or it is larger.
    """
    with open_file(path, follow=follow) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, got more", str(path))
    return content
