"""A model's process says whether it answers somebody now, by the name of its main thread (`ps -o comm`).

`tbe-serve run` ends a stop by it: tritonserver itself may wait for requests that it has lost. A name needs no file,
and is gone with its process.
"""

import ctypes

IDLE, BUSY = "tbe-idle", "tbe-busy"

_PR_SET_NAME = 15  # prctl(2)
_LIBC = ctypes.CDLL(None)


def show(name: str) -> None:
    """Say so, from the main thread: IDLE or BUSY."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())
