"""The memory that this process may use, and the part of it that is left for the weights of a bundle."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from serving.bundle.load import in_use, versions
from serving.bundle.manifest import WEIGHTS_FILES

# The largest share of memory that weights may fill: processes, requests and answers need the rest.
MOST_OF_MEMORY = 0.9
_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")


def memory_of(total_bytes: int, groups: Path, cgroups: Path) -> int:
    """The least of the machine's memory and the limits of control groups, version 1 and 2 (cgroups(7)), in bytes.

    Args:
        total_bytes: the machine's memory.
        groups: a file with the groups of the process, in lines such as `0::/path`.
        cgroups: the folder where the hierarchies are mounted.
    """
    return min([total_bytes, *_limits(groups, cgroups)])


def memory_limit() -> int:
    """The maximum memory that this process may use, in bytes."""
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
        # A group's limit also applies to all groups below it. In a container, the path may be the host's and not
        # exist: the root is the container's own group then.
        for directory in (group, *group.parents):
            if directory.is_relative_to(root) and (directory / name).exists():
                text = (directory / name).read_text().strip()
                if text != "max":
                    yield int(text)


# The memory of a model's process without its tables: 160 MB at the start, and freed memory that it keeps for large
# requests. tritonserver and `tbe-serve run` together need less, 90 MB.
PROCESS_BYTES = 256 << 20
# A process that checks a lock holds it for a moment, so one result of `in_use` can be wrong. All checks must agree.
_LOOKS = 3
_PAUSE_S = 0.01


def most_weights_bytes(processes: int, *, is_pinned: bool) -> int:
    """The maximum bytes of weights files that fit into the memory of the machine or of the control group.

    Args:
        processes: how many processes map the files. Each needs its own memory beside them.
        is_pinned: whether the pages stay in memory because they are locked or on a tmpfs. If these took too much
            memory, the kernel would kill a process.
    """
    memory = memory_limit()
    process_count = processes + 1 if is_pinned else processes
    return min(int(MOST_OF_MEMORY * memory), memory - process_count * PROCESS_BYTES)


def weights_of_others(directory: Path, files: Iterable[Path]) -> dict[Path, int]:
    """The weights files of the repository's other bundles that processes of this machine use, with their bytes.

    A file with several links counts once.

    Args:
        directory: the folder of the bundle, <repository>/<model>/<version>.
        files: the bundle's own weights files. They do not count, even if another bundle links to them.
    """
    used: dict[tuple[int, int], tuple[Path, int]] = {}
    for bundle in _others_in_use(directory):
        for file in bundle.glob(WEIGHTS_FILES):
            with suppress(FileNotFoundError):  # removed meanwhile
                status = file.stat()
                used[status.st_dev, status.st_ino] = file, status.st_size
    for file in files:
        status = file.stat()
        used.pop((status.st_dev, status.st_ino), None)
    return dict(used.values())


def _others_in_use(directory: Path) -> Iterator[Path]:
    resolved = directory.resolve()
    for model in resolved.parent.parent.iterdir():
        for version in versions(model):
            bundle = model / str(version)
            if bundle != resolved and _is_in_use(bundle):
                yield bundle


def _is_in_use(bundle: Path) -> bool:
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        with in_use(bundle) as used:
            if not used:
                return False
    return True
