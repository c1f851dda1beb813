"""How much memory this machine lets us have."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")


def memory_of(total_bytes: int, groups: Path, cgroups: Path) -> int:
    """The least of `total_bytes` and the limits of control groups, of version 2 and 1 (cgroups(7)).

    Args:
        total_bytes: what the machine has.
        groups: lines such as `0::/path`: what the process belongs to.
        cgroups: where the hierarchies are mounted.
    """
    return min([total_bytes, *_limits(groups, cgroups)])


def memory_here() -> int:
    """What this process may have at most, in bytes."""
    return memory_of(psutil.virtual_memory().total, _OF_PROCESS, _CGROUPS)


def _limits(groups: Path, cgroups: Path) -> Iterator[int]:
    if not groups.exists():  # not Linux
        return
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # A limit holds for all below. In a container the path may be the host's: then the root is its own group.
        for each in (group, *group.parents):
            if each.is_relative_to(root) and (each / name).exists():
                said = (each / name).read_text().strip()
                if said != "max":
                    yield int(said)
