"""The name of a model's main thread (`ps -o comm`) says whether it is answering requests now.

`tbe-serve run` reads it while it stops: tritonserver itself may wait for requests that it has lost. A name needs no
file, and disappears with its process.
"""

import ctypes

IDLE, BUSY = "tbe-idle", "tbe-busy"

_PR_SET_NAME = 15  # prctl(2)
_LIBC = ctypes.CDLL(None)


def show(name: str) -> None:
    """Give the calling thread this name, IDLE or BUSY. It must be the main thread."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())
