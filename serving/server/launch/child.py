"""The process of a tritonserver: how it is started and ended.

Only its own user can open the files that it and its children make. umask(2) alone is not enough for that: Boost makes
the Python backend's shared memory, and then opens it to all users by fchmod(2). So a seccomp(2) filter makes the
kernel skip exactly that call. The child process sets the filter on itself before it executes tritonserver.
"""

import contextlib
import ctypes
import logging
import os
import platform
import resource
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from serving.triton.output import Output

_PRIVATE = 0o077
_OPENED = 0o644
# Constants of prctl(2), seccomp(2), <linux/seccomp.h> and <linux/filter.h>.
_PR_SET_NO_NEW_PRIVS = 38
# _SPEC_ALLOW: without it, the kernel slows a program with a filter down, by mitigations for untrusted code.
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_ALLOW, _LEAVE_OUT = 0x7FFF0000, 0x00050000  # _LEAVE_OUT: skip the call, and return 0
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data: the system call, the architecture, and the low half of the second argument.
_NUMBER, _ARCHITECTURE, _SECOND = 0, 4, 24


class _Machine(NamedTuple):
    """An architecture, as <linux/audit.h> numbers it, and its numbers of two system calls."""

    audit: int
    fchmod: int
    seccomp: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 91, 317), "aarch64": _Machine(0xC00000B7, 52, 277)}
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def make_private_files() -> None:
    """From now on, only their own user can open the files that this process and its children make.

    On an architecture that is not in `_MACHINES`, or if a sandbox forbids the filter, other users can still open the
    shared memory of the Python backend.
    """
    os.umask(_PRIVATE)
    machine = _MACHINES.get(platform.machine())
    if machine is not None:
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _LIBC.syscall(machine.seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(_filter_of(machine)))


def _filter_of(machine: _Machine) -> _Program:
    """The filter: skip fchmod(…, 0644), and allow all other calls."""
    steps = (
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 0, 5, machine.audit),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_EQUAL, 0, 3, machine.fchmod),
        (_LOAD, 0, 0, _SECOND),
        (_IF_EQUAL, 0, 1, _OPENED),
        (_RETURN, 0, 0, _LEAVE_OUT),
        (_RETURN, 0, 0, _ALLOW),
    )
    return _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))


# mallopt(3). The server keeps up to this much memory of past requests for the next ones. Memory that it returns must
# be mapped again page by page, which slows large requests. Triton's own pool would keep any size for ever.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}

# Longest wait for killed processes to end, and the pause between checks, in seconds.
_KILLED_S, _LOOKS_S = 2.0, 0.01


@dataclass(frozen=True, slots=True)
class Child:
    """A tritonserver that was started: its process, and its log."""

    process: subprocess.Popen[bytes]
    output: Output

    def end(self, timeout_s: float) -> None:
        """Let it answer the requests that it accepted, and end. After `timeout_s`, kill it.

        The processes of its models are killed, too. All processes are gone when this returns, except one that the
        kernel cannot end yet.
        """
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        # The processes of its models outlive a server that was killed, and keep their memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _await_group(self.process.pid)
        self.output.drain()


def _await_group(group: int) -> None:
    """Wait until all processes of a killed group have ended. Zombies have: their parent has not read their status."""
    end = time.monotonic() + _KILLED_S
    while time.monotonic() < end and any(map(partial(_is_in, group), Path("/proc").glob("[0-9]*/stat"))):
        time.sleep(_LOOKS_S)


def _is_in(group: int, stat: Path) -> bool:
    """Whether a process is in a group and has not ended, by its file /proc/PID/stat, see proc(5)."""
    try:
        state, _, of_group, *_ = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return int(of_group) == group and state not in "ZX"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a tritonserver is started.

    Attributes:
        command: the program and its options.
        environment: environment variables that it gets in addition to ours.
        shm_bytes: most bytes of shared memory of an instance.
        log: what it says goes there.
        folder: its working directory, where a model's Python looks for modules first. None: ours.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    shm_bytes: int
    log: logging.Logger
    folder: Path | None = None

    def start(self, options: Sequence[str] = ()) -> Child:
        """Start a process, with further options."""
        process = subprocess.Popen(
            [*self.command, *options],
            env={**_MALLOC, **os.environ, **self.environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # else it would get a Ctrl-C twice: from the terminal, and from us
            preexec_fn=partial(_in_child, self.shm_bytes),
        )
        return Child(process, Output(cast(BinaryIO, process.stdout), self.log))


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM when the block ends. Earlier, a handler that raises could lose a new process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for number in came:
        signal.raise_signal(number)


def _in_child(shm_bytes: int) -> None:
    """Set the properties of a tritonserver that survive execve(2), in the child process before that call.

    * SIGTERM when its parent ends: prctl(2), PR_SET_PDEATHSIG.
    * A limit on the size of files. The Python backend's file in /dev/shm grows and never shrinks. Without a limit, a
      few hostile requests fill /dev/shm. SIGXFSZ is ignored, so that a file that cannot grow is an error to it.
    * SIGCHLD is ignored. The server does not wait for models' processes that die, so the kernel removes them.
    * SIGPIPE is ignored. When we have ended, its log has no reader, and it still has to answer what it accepted.
    * Files that it and its models make are private. The memory that they share has requests and rows.
    """
    make_private_files()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    for number in (signal.SIGXFSZ, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shm_bytes if most < 0 else min(shm_bytes, most), most))
