"""How much of the machine others had while we measured: what tells a quiet run from a busy one."""

import os
import time
from typing import Any

import psutil

# How long others are looked at, before and after a run.
_SECONDS = 5.0
# In a quiet run others have less than this of a core, and of all cores' time.
_FEW_CORES, _SMALL_SHARE = 0.1, 0.02


class Quietness:
    """Looks at the machine when it is made, and again for `seen`. Our own processes are idle at both times."""

    def __init__(self) -> None:
        self._before = cores_used(_SECONDS)
        self._began, self._stolen_s = time.monotonic(), _stolen_s()

    def activity(self) -> dict[str, Any]:
        """How many cores others kept busy `before` the run and `after` it; and `stolen`, the share of all cores' time
        in between that a virtual machine's host did not give (proc_stat(5), steal). And whether that is `quiet`."""
        stolen = (_stolen_s() - self._stolen_s) / (time.monotonic() - self._began) / (os.cpu_count() or 1)
        after = cores_used(_SECONDS)
        return {
            "before": round(self._before, 3),
            "after": round(after, 3),
            "stolen": round(stolen, 4),
            "quiet": max(self._before, after) < _FEW_CORES and stolen < _SMALL_SHARE,
        }


def cores_used(seconds: float) -> float:
    """How many cores are busy while this process sleeps."""
    before = psutil.cpu_times()
    time.sleep(seconds)
    after = psutil.cpu_times()
    used = (getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system"))
    return float(sum(used)) / seconds


def _stolen_s() -> float:
    return float(psutil.cpu_times().steal)
