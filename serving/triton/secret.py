"""Erase a secret from a process's command line, which every user of the machine can read.

tritonserver takes the key of its restricted protocols as an option and in no other way. It copies its options as it
starts. After that the words of the command line are of no use to it, and can be overwritten: proc(5) says where they
are (arg_start and arg_end of /proc/PID/stat) and how to write there (/proc/PID/mem).

Run with 24.10. 26.04 was read for the name of the backend's library, by which we know that the options were copied.
"""

import subprocess
import time
from pathlib import Path

_BACKEND = "libtriton_python"
_POLL_S = 0.002
_PATIENCE_S = 5.0


def erase_from_command_line(child: "subprocess.Popen[bytes]", secret: str, *, has_started: bool = False) -> bool:
    """Overwrite `secret` in the command line of a tritonserver, as soon as it has copied its options.

    Args:
        child: a tritonserver.
        secret: one of its words, or part of one.
        has_started: it answers, so it has copied its options. Where False, wait for that.

    Returns:
        Whether the secret is gone. The kernel may forbid it: Yama's ptrace_scope 2 and above.
    """
    process = Path("/proc") / str(child.pid)
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while not has_started and not _has_loaded_a_backend(process) and time.monotonic() < deadline:
            if child.poll() is not None:
                return True
            time.sleep(_POLL_S)
        _overwrite(process, secret.encode())
        return secret.encode() not in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _overwrite(process: Path, secret: bytes) -> None:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    with (process / "mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        words = memory.read(end - start)
        memory.seek(start)
        memory.write(words.replace(secret, b"*" * len(secret)))


def _has_loaded_a_backend(process: Path) -> bool:
    return _BACKEND in (process / "maps").read_text()
