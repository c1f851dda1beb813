"""Load for a long time: answers stay right and quick, and nothing grows."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from serving.model.settings import ServingSettings
from serving.server import Server
from tests.soak.served import Publish, serving

SHARE = 0.8
WINDOW_S = 5.0
_PERIOD_S = 1.0
# Of all windows, those that are taken for the first and for the last; what comes before the first settles.
_TENTH = 0.1


@dataclass
class Held:
    """What some processes hold together, one number for each look."""

    memory_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, processes: Sequence[psutil.Process]) -> None:
        """Take note of what they hold now: memory of their own, without the tables' pages."""
        self.memory_bytes.append(
            sum(process.memory_info().rss - process.memory_info().shared for process in processes)
        )
        self.descriptors.append(sum(process.num_fds() for process in processes))
        self.threads.append(sum(process.num_threads() for process in processes))

    def watch(self, server: Server, stopped: threading.Event) -> None:
        """Look every second until `stopped`."""
        process = psutil.Process(server.process.pid)
        while not stopped.wait(_PERIOD_S):
            self.look([process, *process.children(recursive=True)])


def growth(numbers: list[int]) -> int:
    """From the second tenth of the time, when all has settled, to the last."""
    tenth = max(1, int(_TENTH * len(numbers)))
    return round(median(numbers[-tenth:]) - median(numbers[tenth : 2 * tenth]))


@dataclass
class Soaked:
    """What was seen of `what`. `first_p99_s`, `last_p99_s`: medians of the windows of the second and of the last tenth."""

    what: str
    seconds: float
    rate: float
    answers: int
    checked: int
    wrong: list[str]
    errors: dict[str, int]
    first_p99_s: float
    last_p99_s: float
    memory_bytes: int
    descriptors: int
    threads: int

    def line(self) -> str:
        """All in one."""
        return (
            f"{self.seconds / 60:.0f} min of {self.what} at {self.rate:,.0f}/s, {SHARE:.0%} of capacity: "
            f"{self.answers:,} answers, {self.checked:,} checked, {len(self.wrong)} wrong, {sum(self.errors.values())} failed; p99 "
            f"{1e3 * self.first_p99_s:.1f} → {1e3 * self.last_p99_s:.1f} ms "
            f"({self.last_p99_s / self.first_p99_s:.2f}×); memory {self.memory_bytes / 1e6:+.1f} MB, "
            f"descriptors {self.descriptors:+d}, threads {self.threads:+d}"
        )


def soak(folder: Path, seconds: float, publish: Publish) -> Soaked:
    """Ask a model at `SHARE` of what the server can, for so long."""
    usage, stopped = Held(), threading.Event()
    settings = ServingSettings(max_busy_ms=2000)  # a machine that stalls for a moment is not what is looked for
    with serving(folder, settings, samples=128, pooling_factor=5, publish=publish) as served:
        rate = SHARE * served.capacity_per_s(5.0)
        watcher = threading.Thread(target=usage.watch, args=(served.server, stopped))
        watcher.start()
        try:
            runs = served.load(rate=rate, seconds=WINDOW_S, repeats=max(4, round(seconds / WINDOW_S)))
        finally:
            stopped.set()
            watcher.join()
    p99 = [float(np.percentile(run.latencies_s, 99)) for run in runs if run.latencies_s]
    tenth = max(1, int(_TENTH * len(p99)))
    return Soaked(
        what=publish.__name__,
        seconds=sum(run.seconds for run in runs),
        rate=rate,
        answers=sum(len(run.latencies_s) for run in runs),
        checked=sum(run.checked for run in runs),
        wrong=[line for run in runs for line in run.wrong],
        errors=dict(sum((run.errors for run in runs), Counter[str]())),
        first_p99_s=median(p99[tenth : 2 * tenth]),
        last_p99_s=median(p99[-tenth:]),
        memory_bytes=growth(usage.memory_bytes),
        descriptors=growth(usage.descriptors),
        threads=growth(usage.threads),
    )
