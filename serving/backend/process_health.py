"""What a model's process says of itself, which memory it keeps, and when it ends itself.

Busy or idle: a byte, which `serving.triton.stubs` reads. To write it takes no call of the kernel.

Memory: glibc returns what a large request used to Linux as soon as it is freed. The next one then takes a page fault
for every 4 KiB: half of the time of 512 samples of DLRM-v2. `serving.server.child_process` preloads tcmalloc where
it is installed. It keeps that memory, and gives back too little by itself. So does glibc once it is set to keep some.

End with the parent: a stub of Triton 2.51 goes on when its tritonserver is killed. `tbe-serve run` ends the stubs
that a server left. But it may be killed too. So a stub also ends itself when its parent ends.

Pauses: a process that stood still ends itself, rather than answer, because other callers could get its answers.
tritonserver gives a request up when the model's process gave no sign of life within a second of the wall clock,
because it was paused or the clock was set. It hands over the next request all the same. It takes the next answer that
comes for the answer to that: nothing in an answer says which request it belongs to. A process that ended is replaced,
and what it had is refused. Read in Triton 24.10 and 26.06: `StubLauncher::ReceiveMessageFromStub` waits for 1,000 ms,
and a stub gives a sign of life every 300 ms. So a process that was given up stood still for 700 ms or more.
"""

import ctypes
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
from pathlib import Path
from typing import Any

from serving.triton.stubs import BUSY

_LIBC = ctypes.CDLL(None)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def busy_byte() -> mmap.mmap:
    """One byte: 1 while requests are answered, or else 0. It can be seen as long as this process lives."""
    memory = os.memfd_create(BUSY)
    os.ftruncate(memory, 1)
    return mmap.mmap(memory, 1)


# mallopt(3), and glibc's largest for each allocation to come from memory that can be kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_BYTES = -1, -3, 32 << 20
# gperftools' malloc_extension_c.h: what the property counts. A call returns whole runs of pages, and counts what was
# too much against later ones: it may take several calls.
_FREE, _MOST_CALLS = b"tcmalloc.pageheap_free_bytes", 1000
# Most bytes that are kept for the next request.
KEPT_BYTES = 64 << 20


class _Mallinfo2(ctypes.Structure):
    """Of mallinfo2(3), since glibc 2.33: ten numbers."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


# Which of them are bytes in use: in mappings of their own (hblkhd), and others (uordblks).
_IN_MAPPINGS, _IN_HEAPS = 4, 7


class FreedMemory:
    """What malloc keeps of freed memory for the next request: about `KEPT_BYTES`. Other mallocs do as they do.

    glibc keeps what is free at the end of its heap, up to a threshold. But a small object behind it keeps all of it.
    """

    def __init__(self) -> None:
        self._count: Any = getattr(_LIBC, "MallocExtension_GetNumericProperty", None)
        self._mallinfo2: Any = None if self._count else getattr(_LIBC, "mallinfo2", None)
        if self._mallinfo2 is not None:
            self._mallinfo2.restype = _Mallinfo2
            _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
            _LIBC.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
            self._least = self._unused()

    def give_back(self) -> None:
        """Return what is free beyond `KEPT_BYTES` to Linux."""
        if self._count is not None:
            free = ctypes.c_size_t()
            for _ in range(_MOST_CALLS):
                self._count(_FREE, ctypes.byref(free))
                if free.value <= KEPT_BYTES:
                    break
                _LIBC.MallocExtension_ReleaseToSystem(ctypes.c_size_t(free.value - KEPT_BYTES))
        elif self._mallinfo2 is not None:
            unused = self._unused()
            if unused > self._least + KEPT_BYTES:
                _LIBC.malloc_trim(0)
                self._least = self._unused()
            self._least = min(self._least, unused)

    def _unused(self) -> int:
        """Bytes of this process's own memory that no object of malloc is in: freed ones, and what is not malloc's."""
        numbers: list[int] = self._mallinfo2().numbers
        resident, shared = map(int, Path("/proc/self/statm").read_bytes().split()[1:3])
        return (resident - shared) * _PAGE_BYTES - numbers[_IN_HEAPS] - numbers[_IN_MAPPINGS]


@cache
def end_with_parent() -> None:
    """From now on, kill this process when its parent ends. A thread sleeps until then.

    Nothing is done if Linux is older than 5.3, which has pidfd_open(2), or if a sandbox forbids that call.
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
# A process that stood still for this long ends. tritonserver has given up none that stood still for less than 0.7 s.
_LONGEST_S = 0.5
# A thread that waits for Python's lock, which a copy of a gigabyte may hold for a second, does so for 5 ms at a time
# (sys.getswitchinterval); for longer where others have the cores.
_WAIT_S = 0.02


def _end(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Pauses:
    """Sees by a thread that wakes ten times a second whether this process stood still, and ends the process then.

    Args:
        clock: the wall clock, in seconds.
        end: called with a line that says why the process has to end.
    """

    def __init__(self, clock: Callable[[], float] = time.time, end: Callable[[str], None] = _end) -> None:
        self._clock = clock
        self._end = end
        self._seen = clock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="pauses", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def check(self) -> None:
        """Return only if this process did not stand still; before requests are read, and before they are answered."""
        while self._clock() - self._seen > _PERIOD_S + _LONGEST_S and not self._stopped.is_set():
            time.sleep(0.001)  # until the thread has seen why: it may have waited for Python's lock

    def _run(self) -> None:
        self._seen, waits = self._clock(), _waits()
        while not self._stopped.wait(_PERIOD_S):
            now, waits_now = self._clock(), _waits()
            still_s = stood_still_s(now - self._seen, waits_now - waits)
            if still_s > _LONGEST_S:
                self._end(
                    f"this process stood still for {still_s:.1f} s, or the clock was set: Triton may have given up "
                    "what it has, and would give its answers to other callers. It ends, to be loaded anew"
                )
            self._seen, waits = now, waits_now


def stood_still_s(elapsed_s: float, waits: int) -> float:
    """For how much of the time a process stood still whose thread slept for _PERIOD_S and waited so many times."""
    return elapsed_s - _PERIOD_S - _WAIT_S * waits


def _waits() -> int:
    """How often this thread has waited and gone on."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
