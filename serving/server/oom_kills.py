"""Whether the kernel ended processes for want of memory. Nobody else says so: such a process is only gone."""

import time
from pathlib import Path

_COUNTS = Path("/proc/vmstat")
_SAID = "; just then the kernel ended a process of this machine for want of memory: if it was this, give it more"
# A process is missed sooner than that after its end.
_JUST_S = 3.0


class OomKills:
    """Notices processes that the kernel ended, of whatever control group: `oom_kill` of proc_vmstat(5), Linux 4.13.

    Args:
        counts: what Linux counts.
    """

    def __init__(self, counts: Path = _COUNTS) -> None:
        self._counts = counts
        self._seen = self._count()
        self._at: float | None = None

    def look(self) -> None:
        """Notice what happened since the last look. It counts as having happened now."""
        before, self._seen = self._seen, self._count()
        if self._seen > before:
            self._at = time.monotonic()

    def said(self) -> str:
        """What to add to the reason why a process is gone; empty if the kernel ended none in the last 3 s."""
        self.look()
        return _SAID if self._at is not None and time.monotonic() - self._at < _JUST_S else ""

    def _count(self) -> int:
        try:
            lines = self._counts.read_text().splitlines()
        except OSError:  # not Linux, or a sandbox hides it
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
