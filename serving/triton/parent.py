"""The end of a model's process together with its tritonserver.

Triton 2.51 does not tell its models when it is killed, and they do not look. `tbe-serve run` ends those that a server
left, but it may be killed too: then they would stay, with their memory.
"""

import os
import select
import signal
import threading
from functools import cache


@cache
def end_with_parent() -> None:
    """From now on, end this process when its parent ends, whatever it is at. It takes no time until then.

    Where Linux has no descriptors of processes (pidfd_open(2), 5.3), or a sandbox forbids them, nothing is done.
    """
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:
        return
    threading.Thread(target=_wait, args=(parent,), name="parent", daemon=True).start()


def _wait(parent: int) -> None:
    ended = select.poll()
    ended.register(parent, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)
