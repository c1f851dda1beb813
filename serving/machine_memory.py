"""How much memory this process may use."""

import os
from collections.abc import Iterator
from pathlib import Path

# Weights are kept in memory if they fill no more of it than this: processes, requests and answers need the rest.
MOST_OF_MEMORY = 0.9
_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")


def memory_of(total_bytes: int, groups: Path, cgroups: Path) -> int:
    """The least of the machine's memory and the limits of control groups, version 1 and 2 (cgroups(7)), in bytes.

    Args:
        total_bytes: the machine's memory.
        groups: a file with lines such as `0::/path`, the groups of the process.
        cgroups: the folder where the hierarchies are mounted.
    """
    return min([total_bytes, *_limits(groups, cgroups)])


def memory_here() -> int:
    """The most memory that this process may use, in bytes."""
    return memory_of(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _OF_PROCESS, _CGROUPS)


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
        # A group's limit holds for all groups below it. In a container the path may be the host's, and is not there:
        # then the container's own group is the root.
        for each in (group, *group.parents):
            if each.is_relative_to(root) and (each / name).exists():
                said = (each / name).read_text().strip()
                if said != "max":
                    yield int(said)
