"""What a process of tests starts ends with it, however it ends: one that is killed stops no servers.

A watcher beside it waits for its end, and ends whatever has its mark: a variable that processes inherit, also those
that a server, a browser or a shell starts.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path

_MARK = "TBE_SERVING_TESTS"
# A server that is told to stop removes what it has in /dev/shm and elsewhere. After so long it is killed, in seconds.
_GRACE_S = 10.0
_CHECK_PERIOD_S = 0.1
# Triton makes one where it starts, and leaves it if it is killed.
_LEFT_BY_TRITON = "/tmp/python_env_*"
_watchers: list["subprocess.Popen[bytes]"] = []


def end_together() -> None:
    """From now on, all that this process starts ends when it has ended."""
    os.environ[_MARK] = secrets.token_hex(16)
    command = [sys.executable, "-I", __file__, str(os.getpid()), os.environ[_MARK]]
    nothing = subprocess.DEVNULL
    # Kept, since Python warns of one that it forgets; in a session of its own, since Ctrl-C is not meant for it.
    _watchers.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True))


def _watch(process: int, mark: str) -> None:
    """Wait until a process has ended, and end all that have its mark."""
    began = time.time()
    with suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(process), select.POLLIN)
        ended.poll()
    warned: set[int] = set()
    killed_from = time.monotonic() + _GRACE_S
    while marked := dict(_marked(f"{_MARK}={mark}".encode())):
        kills = time.monotonic() > killed_from
        for name, parent in marked.items():
            # Whoever has a parent here is its to stop: models' processes are tritonserver's, that is `tbe-serve
            # run`'s.
            if kills or (name not in warned and parent not in marked):
                warned.add(name)
                with suppress(OSError):
                    os.kill(name, signal.SIGKILL if kills else signal.SIGTERM)
        time.sleep(_CHECK_PERIOD_S)
    if not _is_running("tritonserver"):
        for folder in glob(_LEFT_BY_TRITON):
            with suppress(OSError):  # it is not empty, or another's
                if os.stat(folder).st_ctime > began:
                    os.rmdir(folder)


def _is_running(program: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text() == f"{program}\n":
                return True
    return False


def _marked(mark: bytes) -> Iterator[tuple[int, int]]:
    """The processes with this in their environment, but for this one, each with its parent: by proc(5)."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name), int((path / "stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
