"""A control group of this machine with a memory limit, of version 1 or 2."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class NoControlGroup(Exception):
    """This machine lets this user make none that limits memory."""


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Make a control group, and remove it when the block ends. A process enters it by writing its id to the file.

    Args:
        limit_bytes: of its memory, the page cache of its files included.

    Yields:
        Its file `cgroup.procs`.

    Raises:
        NoControlGroup: why it cannot be made.
    """
    is_first_version = (_ROOT / "memory" / "memory.limit_in_bytes").exists()
    group = (_ROOT / "memory" if is_first_version else _ROOT) / f"tbe-tests-{uuid.uuid4().hex[:12]}"
    limit = group / ("memory.limit_in_bytes" if is_first_version else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        raise NoControlGroup(f"{group}: {error.strerror}") from error
    try:
        if not limit.exists():
            raise NoControlGroup(f"{limit}: the memory controller is not enabled for groups below {_ROOT}")
        limit.write_text(str(limit_bytes))
        # Without swap, also where version 1 counts it.
        for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (group / name).exists():
                (group / name).write_text("0" if name == "memory.swap.max" else str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        os.rmdir(group)
