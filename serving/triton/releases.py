"""The releases of Triton that we know, an entry each.

An entry holds what differs between releases. What is the same in all of them lies beside this file, by subject::

    options       the command line
    secret        how a word of the command line is erased
    installation  where the program is, and what it needs
    output        the format of the log
    control       the HTTP API that loads and unloads models
    stubs         the processes of Python models
    presence      how such a process says whether it is answering
    sayings       the words of error messages

Each of these says which releases it was run with, and which it was read for: compared with their source. To support
another release, add its entry here and go through those files.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release of Triton.

    Attributes:
        container: tag of the official container.
        version: major and minor version of its tritonserver.
        is_secure: whether it has the security fixes that a server needs which other machines can reach.
    """

    container: str
    version: tuple[int, int]
    is_secure: bool


# Oldest first.
RELEASES = (
    # The one in nvidia-pytriton 0.7.0. It lacks the fixes of 2025 to the Python backend's shared memory, and others.
    Release(container="24.10", version=(2, 51), is_secure=False),
    Release(container="26.04", version=(2, 68), is_secure=True),
)


def release_of(version: str) -> Release:
    """The entry for a server: the newest one that is not newer than it, or the oldest.

    Args:
        version: as the server gives it, such as "2.51.0".
    """
    major, minor = map(int, version.split(".")[:2])
    return max((each for each in RELEASES if each.version <= (major, minor)), key=_version, default=RELEASES[0])


def oldest_secure() -> Release:
    """The oldest release that other machines may reach."""
    return min((each for each in RELEASES if each.is_secure), key=_version)


def _version(release: Release) -> tuple[int, int]:
    return release.version
