"""Another user of the machine, who tries all that a server leaves lying about.

    python tests/support/other_user.py < JSON of {"paths": […], "processes": […]}

Run as root, it becomes `nobody`. Prints as JSON what succeeded of what it tried: [["read", "/dev/shm/…"], …].
"""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

NOBODY = 65534


def try_all(paths: Iterable[Path], processes: Iterable[int]) -> set[tuple[str, str]]:
    """What `nobody` succeeds in."""
    message = json.dumps({"paths": [str(path) for path in paths], "processes": [*processes]})
    done = subprocess.run(
        [sys.executable, __file__], input=message, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(what, where) for what, where in json.loads(done.stdout)}


def _opened(flags: int) -> Callable[[str], None]:
    return lambda path: os.close(os.open(path, flags | os.O_NONBLOCK))


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(path)


def _create(folder: str) -> None:
    os.close(os.open(f"{folder}/outsider", os.O_CREAT | os.O_WRONLY, 0o600))


# What destroys comes last.
_OF_ALL: dict[str, Callable[[str], object]] = {
    "chmod": lambda path: os.chmod(path, 0o777),
    "rename": lambda path: os.rename(path, f"{path}.outsider"),
    "unlink": os.unlink,
}
_OF_FILES: dict[str, Callable[[str], object]] = {
    "read": _opened(os.O_RDONLY), "write": _opened(os.O_WRONLY), "truncate": lambda path: os.truncate(path, 0), **_OF_ALL,
}  # fmt: skip
_OF_FOLDERS: dict[str, Callable[[str], object]] = {
    "list": os.listdir,
    "create": _create,
    **_OF_ALL,
    "unlink": os.rmdir,
}
_OF_SOCKETS: dict[str, Callable[[str], object]] = {"connect": _connect, **_OF_ALL}
_OF_PROCESSES: dict[str, Callable[[str], object]] = {
    "environ": lambda path: Path(path, "environ").read_bytes(),
    "maps": lambda path: Path(path, "maps").read_bytes(),
    "mem": lambda path: os.close(os.open(f"{path}/mem", os.O_RDONLY)),
    "fd": lambda path: os.listdir(f"{path}/fd"),
    "cwd": lambda path: os.readlink(f"{path}/cwd"),
    "kill": lambda path: os.kill(int(Path(path).name), 0),
}


def _main() -> None:
    request = json.load(sys.stdin)
    # Before it becomes another: what is there, and of which kind.
    tried = [(path, _kind(path)) for path in request["paths"]]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tried += [(f"/proc/{process}", _OF_PROCESSES) for process in request["processes"]]
    succeeded = []
    for path, attempts in tried:
        for name, attempt in attempts.items():
            with suppress(OSError):
                attempt(path)
                succeeded.append((name, path))
    print(json.dumps(succeeded))


def _kind(path: str) -> dict[str, Callable[[str], object]]:
    mode = os.lstat(path).st_mode
    return _OF_FOLDERS if stat.S_ISDIR(mode) else _OF_SOCKETS if stat.S_ISSOCK(mode) else _OF_FILES


if __name__ == "__main__":
    _main()
