"""Servers of the demo: where they run, and what memory they may take."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

# What a host may take, server and tables together, in bytes. All tables and a server take more.
LIMIT_BYTES = 700 << 20
_CGROUPS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


@dataclass(frozen=True)
class Place:
    """Where a server runs.

    Attributes:
        address: where it listens.
        within: the command that runs it there.
    """

    address: str
    within: tuple[str, ...] = ()


@contextmanager
def served(repository: Path, machine: Place, group: Path | None) -> Iterator["subprocess.Popen[str]"]:
    """`tbe-serve run`, ready; in a cgroup where there is one."""
    joins = () if group is None else ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    access = ("--insecure",) if machine.within else ()
    command = [*joins, *machine.within, sys.executable, "-m", "serving", "run", str(repository), "--json", "--follow"]
    options = ["--unload-after-s", "3", "--host", machine.address, "--grpc-port", "8401"]
    options += ["--operations-host", machine.address, "--operations-port", "8402"]
    log = repository.with_suffix(".log")
    with log.open("w") as file, _started([*command, *options, *access], file) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(f"{repository}: did not start: {log.read_text()}")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _started(command: Sequence[str], log: IO[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


@contextmanager
def memory_limit(name: str, limit_bytes: int = LIMIT_BYTES) -> Iterator[Path | None]:
    """A cgroup that may take `limit_bytes` of memory; None where none can be made."""
    for root, limit in _CGROUPS:
        group = Path(root) / name
        try:
            group.mkdir()
        except OSError:
            continue
        # Elsewhere the folder is an ordinary one, such as of the tmpfs that holds the hierarchies of version 1.
        if not (group / limit).exists():
            group.rmdir()
            continue
        (group / limit).write_text(str(limit_bytes))
        try:
            yield group
        finally:
            with suppress(OSError):
                group.rmdir()
        return
    yield None


def resident_bytes(process: "subprocess.Popen[str]") -> int:
    """What a server and its models take: the proportional share of each of its processes."""
    every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    total = 0
    for member in every:
        with suppress(psutil.Error):
            total += member.memory_full_info().pss
    return total
