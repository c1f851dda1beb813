"""What Triton says and what it means to a caller, where its status says something else.

This is the only file that goes by the words of a message. A model that is loaded anew and one that never was are both
NOT_FOUND; a fault of the server and memory that is full for a moment are both INTERNAL. The words are those of Triton
2.51, and of the sources of later ones. What another version words otherwise is another line here.
"""

import re
from typing import NamedTuple

from serving.errors import ModelUnavailable, ServerFull, ServingError, from_status


class _Saying(NamedTuple):
    code: str
    words: str
    kind: type[ServingError]
    advice: str


_SAYINGS = (
    # It has the model, and no version that is ready. Of what it does not have it says "is not found".
    _Saying("NOT_FOUND", r" has no available versions$", ModelUnavailable, "it is being loaded, or the server stops"),
    # Its process has died, and was not replaced yet.
    _Saying("INTERNAL", r"Stub process '[^']*' is not healthy", ModelUnavailable, "its process died"),
    # Requests of others took the room, or this one is larger than there is room.
    _Saying(
        "INTERNAL",
        r"Failed to increase the shared memory pool size|the grown shared memory region",
        ServerFull,
        "what is handed over together does not fit: send less at once, or raise --shm-mib",
    ),
)


def error_of(code: str, said: str, where: str = "") -> ServingError:
    """The error for a gRPC status, `code` by its name ("UNAVAILABLE"), and what the server `said` with it.

    Args:
        where: begins the error's message.
    """
    for saying in _SAYINGS:
        if saying.code == code and re.search(saying.words, said):
            return saying.kind(f"{where}{said}: {saying.advice}: try again")
    return from_status(code, f"{where}{said}")
