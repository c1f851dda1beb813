"""Have a program and its children make files that their user alone can open.

umask(2) does not suffice. The Python backend's shared memory is made by Boost, which opens it to all by fchmod(2)
after it was made. So the kernel is told to leave out exactly that call: seccomp(2), a filter that whoever starts the
program sets on itself before.
"""

import ctypes
import os
import platform
import struct
from typing import NamedTuple

_PRIVATE = 0o077
_OPENED = 0o644
# prctl(2), seccomp(2), <linux/seccomp.h>, <linux/filter.h>
_PR_SET_NO_NEW_PRIVS = 38
# The filter is no reason to slow the program down as if it could not be trusted.
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_ALLOW, _LEAVE_OUT = 0x7FFF0000, 0x00050000  # the latter: the call returns 0
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Where the filter finds the system call, the architecture, and the low half of the second argument.
_NUMBER, _ARCHITECTURE, _SECOND = 0, 4, 24


class _Machine(NamedTuple):
    """The architecture, by <linux/audit.h>, and the numbers of two system calls."""

    audit: int
    fchmod: int
    seccomp: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 91, 317), "aarch64": _Machine(0xC00000B7, 52, 277)}
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def make_private_files() -> None:
    """From now on, what this process and its children make is their user's alone.

    On another architecture, or where a sandbox forbids the filter, shared memory of the Python backend stays open.
    """
    os.umask(_PRIVATE)
    machine = _MACHINES.get(platform.machine())
    if machine is not None:
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _LIBC.syscall(machine.seccomp, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(_filter_of(machine)))


def _filter_of(machine: _Machine) -> _Program:
    """Leaves fchmod(…, 0644) out. All other calls are made."""
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
