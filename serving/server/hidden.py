"""Take a secret out of a process's command line, which every user of the machine can read.

tritonserver takes the key to what it keeps closed as an option alone. It copies its options as it starts; then
the words themselves are no longer needed (proc(5): arg_start and arg_end of /proc/PID/stat, and /proc/PID/mem).
"""

import subprocess
import time
from pathlib import Path

_POLL_S = 0.002
_PATIENCE_S = 5.0


def hide(child: "subprocess.Popen[bytes]", secret: str, *, answers: bool = False) -> bool:
    """Overwrite `secret` in the command line of a child that has just started, once it has read it.

    Args:
        child: a tritonserver.
        secret: one of its words, or part of one.
        answers: it was seen to answer, so it has read its options.

    Returns:
        Whether nobody can read it any more. The kernel may forbid it: Yama's ptrace_scope 2 and above.
    """
    process = Path("/proc") / str(child.pid)
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while not answers and not _has_read_options(process) and time.monotonic() < deadline:
            if child.poll() is not None:
                return True
            time.sleep(_POLL_S)
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        with (process / "mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            words = memory.read(end - start)
            memory.seek(start)
            memory.write(words.replace(secret.encode(), b"*" * len(secret)))
        return secret.encode() not in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _has_read_options(process: Path) -> bool:
    """Whether it has begun to work: it has loaded a backend."""
    return "libtriton_python" in (process / "maps").read_text()
