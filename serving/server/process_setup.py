"""Set up a process, and execute a program in it: `python -I -S process_setup.py PARENT BYTES PROGRAM …`.

`serving.server.child_process` runs this script. It imports nothing but Python's own modules, and few of them.

Only its own user can open the files that the program and its children make. umask(2) alone is not enough for that:
Boost makes the Python backend's shared memory, and then opens it to all users by fchmod(2). So a seccomp(2) filter
makes the kernel skip exactly that call.

The filter also skips chmod(…, S_IXUSR). Triton tries the Python backend's program by system(3), which cannot tell how
it ended, because SIGCHLD is ignored. Triton then tries to make the program executable, which fails if the program
belongs to another user, as in Triton's own image, although it is executable already.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import NamedTuple

_PRIVATE = 0o077
_OPENED, _EXECUTABLE = 0o644, 0o100
# Constants of prctl(2), seccomp(2), <linux/seccomp.h> and <linux/filter.h>.
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
# _SPEC_ALLOW: without it, the kernel slows a program with a filter down, by mitigations for untrusted code.
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_ALLOW, _LEAVE_OUT = 0x7FFF0000, 0x00050000  # _LEAVE_OUT: skip the call, and return 0
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data: the system call, the architecture, and the low halves of two arguments.
_NUMBER, _ARCHITECTURE, _SECOND, _THIRD = 0, 4, 24, 32


class _Machine(NamedTuple):
    """An architecture, as <linux/audit.h> numbers it, its number of seccomp(2), and the calls that are skipped.

    A skipped call is its number, the offset of its argument with the mode, and that mode.
    """

    audit: int
    seccomp: int
    skipped: tuple[tuple[int, int, int], ...]


_MACHINES = {
    "x86_64": _Machine(  # fchmod, chmod, fchmodat
        0xC000003E, 317, ((91, _SECOND, _OPENED), (90, _SECOND, _EXECUTABLE), (268, _THIRD, _EXECUTABLE))
    ),
    "aarch64": _Machine(0xC00000B7, 277, ((52, _SECOND, _OPENED), (53, _THIRD, _EXECUTABLE))),
}
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
    machine = _MACHINES.get(os.uname().machine)
    if machine is not None:
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _LIBC.syscall(machine.seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(_filter_of(machine)))


def _filter_of(machine: _Machine) -> _Program:
    """A filter that skips the calls of a machine and allows all others."""
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number, where, mode in machine.skipped:
        steps += [
            (_LOAD, 0, 0, _NUMBER),
            (_IF_EQUAL, 0, 3, number),
            (_LOAD, 0, 0, where),
            (_IF_EQUAL, 0, 1, mode),
            (_RETURN, 0, 0, _LEAVE_OUT),
        ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))


def main(parent: int, shm_bytes: int, program: list[str]) -> None:
    """Set what survives execve(2), and execute the program.

    * SIGTERM when its parent ends: prctl(2), PR_SET_PDEATHSIG.
    * A limit on the size of files. The Python backend's file in /dev/shm grows and never shrinks. Without a limit, a
      few hostile requests fill /dev/shm. SIGXFSZ is ignored, so that a file that cannot grow is an error to it.
    * SIGCHLD is ignored. The server does not wait for models' processes that die, so the kernel removes them.
    * SIGPIPE is ignored. When its parent has ended, its log has no reader, and it still has to answer what it
      accepted.
    * Files that it and its models make are private. The memory that they share has requests and rows.
    """
    make_private_files()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)
    for number in (signal.SIGXFSZ, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (shm_bytes if most < 0 else min(shm_bytes, most), most))
    os.execv(program[0], program)  # noqa: S606  its arguments are those of this script


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
