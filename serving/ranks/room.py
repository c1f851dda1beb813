"""How much memory there is for the weights of a bundle, beside those of other bundles that are served."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from serving.bundle.manifest import WEIGHTS_FILES
from serving.bundle.opening import versions
from serving.bundle.use import in_use
from serving.machine_memory import MOST_OF_MEMORY, memory_here

# What a process with torch takes at least, and what tritonserver does with those that look after it.
_PROCESS_BYTES = 256 << 20
# `in_use` sees others that look at the same moment, too.
_LOOKS = 3
_PAUSE_S = 0.01


def room_alone(processes: int, *, kept: bool) -> int:
    """The most bytes of weights that the machine's memory, or the control group's, holds.

    Args:
        processes: how many have them mapped. They need memory of their own.
        kept: whether weights are never given up: locked, or on a tmpfs. The kernel would end a process for more.
    """
    memory = memory_here()
    others = processes + 1 if kept else processes
    return min(int(MOST_OF_MEMORY * memory), memory - others * _PROCESS_BYTES)


def weights_of_others(directory: Path, files: Iterable[Path]) -> dict[Path, int]:
    """The sizes of other bundles' weights in a repository, which processes of this machine use: each file once.

    Args:
        directory: of the bundle, <repository>/<model>/<version>.
        files: its own weights. What others share with it (links) does not count.
    """
    used: dict[tuple[int, int], tuple[Path, int]] = {}
    for bundle in _others_in_use(directory):
        for file in bundle.glob(WEIGHTS_FILES):
            with suppress(FileNotFoundError):  # removed meanwhile
                found = file.stat()
                used[found.st_dev, found.st_ino] = file, found.st_size
    for file in files:
        found = file.stat()
        used.pop((found.st_dev, found.st_ino), None)
    return dict(used.values())


def _others_in_use(directory: Path) -> Iterator[Path]:
    own = directory.resolve()
    for model in own.parent.parent.iterdir():
        for version in versions(model):
            bundle = model / str(version)
            if bundle != own and _is_in_use(bundle):
                yield bundle


def _is_in_use(bundle: Path) -> bool:
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        with in_use(bundle) as used:
            if not used:
                return False
    return True
