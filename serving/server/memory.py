"""The memory of a process, as Linux says: proc_pid_smaps(5) and proc_pid_maps(5)."""

import re
from pathlib import Path

from serving.files.page_cache import huge_bytes_of
from serving.files.strict import Strict
from serving.ranks.shared_copy import COPY_PREFIX

_WEIGHTS = re.compile(
    rf"^([0-9a-f]+)-([0-9a-f]+) .*/(?:weights\.\d+\.bin|{COPY_PREFIX}[0-9a-f]{{64}})$", re.MULTILINE
)


class ProcessMemory(Strict, frozen=True):
    """The memory of a process, in bytes.

    Attributes:
        resident: what is in memory of all that it uses, shared pages included.
        share: the same, with a page that N processes use counted as 1/N of it (PSS). The shares of all processes add
            up to what they use together.
        mapped: the files of weights that it has mapped, in memory or not.
        huge: what it has mapped in huge pages, of files or of copies of them.
    """

    resident: int
    share: int
    mapped: int
    huge: int


def process_memory(pid: int) -> ProcessMemory | None:
    """The memory of a process; None if it has ended, or is not ours to look at."""
    process = Path("/proc") / str(pid)
    try:
        rollup = (process / "smaps_rollup").read_text()
        maps = (process / "maps").read_text()
    except OSError:
        return None
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE)}
    return ProcessMemory(
        resident=kib["Rss"] << 10,
        share=kib["Pss"] << 10,
        mapped=sum(int(end, 16) - int(start, 16) for start, end in _WEIGHTS.findall(maps)),
        huge=huge_bytes_of(rollup),
    )
