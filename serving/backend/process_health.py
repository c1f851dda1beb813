"""The state of a model's process: whether it is busy, and when it ends itself.

Busy or idle: a byte in shared memory, which `serving.triton.stubs` reads. Writing it takes no system call.

End with the parent: a stub of Triton 2.51 keeps running when its tritonserver is killed. `tbe-serve run` ends such
stubs, but may be killed as well. So a stub also ends itself when its parent ends.

Pauses: a process that was paused ends itself instead of answering, because its answers could reach other callers.
tritonserver abandons a request if the model's process gives no sign of life within a second of wall-clock time,
because it was paused or the clock was set. It still hands over the next request, and takes the next answer as the
answer to that one: an answer does not say which request it belongs to. A process that has ended is replaced, and its
requests are refused. In Triton 24.10 and 26.06, `StubLauncher::ReceiveMessageFromStub` waits for 1,000 ms, and a stub
gives a sign of life every 300 ms. So a process whose request was abandoned was paused for 700 ms or more.
"""

import mmap
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

from serving.triton.stubs import BUSY


def busy_byte() -> mmap.mmap:
    """One byte of shared memory: 1 while requests are answered, otherwise 0. It exists as long as the process."""
    memory = os.memfd_create(BUSY)
    os.ftruncate(memory, 1)
    return mmap.mmap(memory, 1)


@cache
def end_with_parent() -> None:
    """Start a thread that kills this process when its parent ends.

    It does nothing if Linux is older than 5.3, which added pidfd_open(2), or if a sandbox forbids that call.
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


_PERIOD_S = 0.1
# A process that was paused for this long ends itself. tritonserver abandons no request before 0.7 s.
_LONGEST_S = 0.5
# A thread waits for Python's lock, which a copy of a gigabyte may hold for a second, in steps of 5 ms
# (sys.getswitchinterval), or longer if other processes use the cores.
_WAIT_S = 0.02


def _end(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Pauses:
    """Ends this process if it was paused, which a thread notices that wakes ten times a second.

    Args:
        clock: the wall clock, in seconds.
        end: called with the reason, a line.
    """

    def __init__(self, clock: Callable[[], float] = time.time, end: Callable[[str], None] = _end) -> None:
        self._clock = clock
        self._end = end
        self._checked_at = clock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="pauses", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def check(self) -> None:
        """Return only if this process was not paused. It is called before reading and before answering requests."""
        while self._clock() - self._checked_at > _PERIOD_S + _LONGEST_S and not self._stopped.is_set():
            time.sleep(0.001)  # until the thread knows the reason: it may have waited for Python's lock

    def _run(self) -> None:
        self._checked_at, waits = self._clock(), _waits()
        while not self._stopped.wait(_PERIOD_S):
            now, waits_now = self._clock(), _waits()
            pause_s = paused_s(now - self._checked_at, waits_now - waits)
            if pause_s > _LONGEST_S:
                self._end(
                    f"this process was paused for {pause_s:.1f} s, or the clock was set: Triton may have abandoned "
                    "its requests, and would give its answers to other callers. It ends, to be loaded again"
                )
            self._checked_at, waits = now, waits_now


def paused_s(elapsed_s: float, waits: int) -> float:
    """How long a process was paused, if its thread slept for _PERIOD_S and waited `waits` times in `elapsed_s`."""
    return elapsed_s - _PERIOD_S - _WAIT_S * waits


def _waits() -> int:
    """The number of times that this thread has waited."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
