"""What an error of Triton means to a caller, where its status alone does not say.

This is the only file that goes by the words of a message. NOT_FOUND is the status of a model that is being loaded and
of one that never was. INTERNAL is the status of a fault and of shared memory that is full for a moment. A client does
not know the release of its server, so the words of all releases are looked for.

Run with 24.10. Read for 26.04, which has the same words. If another release words one differently, add a line.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from serving.errors import ModelUnavailable, ServingError, SharedMemoryFull, from_status
from serving.said import shown


class _Saying(NamedTuple):
    code: str
    words: str
    kind: type[ServingError]
    advice: str


# Triton says the same of a version that is being loaded and of one that was unloaded for good.
_NOT_LOADED = "it is being loaded, was unloaded, or the server stops: try again, unless it was unloaded"
_SAYINGS = (
    # The model is known, and no version of it is ready. Of an unknown model Triton says "is not found".
    _Saying("NOT_FOUND", r" has no available versions$", ModelUnavailable, _NOT_LOADED),
    _Saying("UNAVAILABLE", r" is not at ready state$", ModelUnavailable, _NOT_LOADED),
    # The model's process died and was not replaced yet.
    _Saying("INTERNAL", r"Stub process '[^']*' is not healthy", ModelUnavailable, "its process died: try again"),
    # Other requests use the shared memory, or this one is larger than all of it.
    _Saying(
        "INTERNAL",
        r"Failed to increase the shared memory pool size|the grown shared memory region",
        SharedMemoryFull,
        "what is handed over together does not fit: send less at once, or raise --shm-mib: try again",
    ),
)


# What a load says of the first version that could not be loaded. Versions that serve are loaded anew with the others.
_NOT_LOADED_VERSION = re.compile(r"version (\d+) is at UNAVAILABLE state: (?:Internal: TritonModelException: )?")


def load_failure(said: str, ready: Callable[[], Collection[int]]) -> str:
    """What a load that failed said, in words that hold: a version that could not be loaded anew may serve on.

    Args:
        said: by Triton.
        ready: the versions of the model that serve now.
    """
    found = _NOT_LOADED_VERSION.search(said)
    if found is None:
        return said
    how = ", which serves on, cannot be loaded anew" if int(found[1]) in ready() else " cannot be loaded"
    return f"{said[: found.start()]}version {found[1]}{how}: {said[found.end() :]}"


def error_of(code: str, said: str, where: str = "") -> ServingError:
    """The error for a gRPC status and its message.

    Args:
        code: the name of the status, such as "UNAVAILABLE".
        said: the message that came with it. Anybody may have sent it.
        where: begins the error's message.
    """
    text = f"{where}{shown(said)}"
    for saying in _SAYINGS:
        if saying.code == code and re.search(saying.words, said):
            return saying.kind(f"{text}: {saying.advice}")
    return from_status(code, text)
