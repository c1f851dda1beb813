"""Whether the kernel ended processes for want of memory. Nobody else says so: such a process is only gone."""

from pathlib import Path

_COUNTS = Path("/proc/vmstat")
_SAID = "; meanwhile the kernel ended a process of this machine for want of memory: give it, or the container, more"


class OomKills:
    """Notices processes that the kernel ended, of whatever control group: `oom_kill` of proc_vmstat(5), Linux 4.13.

    Args:
        counts: what Linux counts.
    """

    def __init__(self, counts: Path = _COUNTS) -> None:
        self._counts = counts
        self._seen = self._count()

    def since(self) -> str:
        """What to add to the reason why a process is gone; empty if the kernel ended none since this was asked."""
        before, self._seen = self._seen, self._count()
        return _SAID if self._seen > before else ""

    def _count(self) -> int:
        try:
            lines = self._counts.read_text().splitlines()
        except OSError:  # not Linux, or a sandbox hides it
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
