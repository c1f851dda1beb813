"""`make faults`: each fault again and again, and one line of figures."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.faults import clients, files, fresh, histories, lying, memory, reloads, servers, whole
from tests.faults.hosts import machines
from tests.support.process_cleanup import end_together

IDS = 237_000_000  # 1.9 GB

figures: list[str] = []
end_together()
with tempfile.TemporaryDirectory(prefix="tbe-faults-") as name:
    folder = Path(name)
    faults: list[Callable[[], str]] = [
        lambda: servers.restarted(folder / "restarted", 10).line(),
        lambda: servers.stub_killed(folder / "killed", 10).line(),
        lambda: servers.paused(folder / "stopped", 5, servers.by_sigstop).line(),
        lambda: servers.paused(folder / "held", 5, servers.by_a_debugger).line(),
        lambda: reloads.reloaded(folder / "reloads", 300).line(),
        lambda: (
            f"{len(files.published_at_once(folder / 'published', 4, 5))} of 20 versions of 4 publishers are whole"
        ),
        lambda: clients.disconnected(folder / "cancelled", 2000, cancelled=True).line(),
        lambda: clients.disconnected(folder / "deadlines", 2000, cancelled=False).line(),
        lambda: clients.give_up(folder / "given-up", 20).line(),
        lambda: clients.slow(folder / "slow", 40).line(),
        lambda: memory.shared_memory_full(folder / "full").line(),
        lambda: memory.huge(folder / "huge", clients.message(IDS), 5).line(),
        lambda: "scores: " + servers.stub_killed(folder / "scored", 10, whole.published).line(),
        lambda: "scores: " + servers.restarted(folder / "scored-again", 10, whole.published).line(),
        lambda: whole.damaged_rolled_out(folder / "damaged", whole.DAMAGES).line(),
        lambda: whole.shed(folder / "shed", 200).line(),
        lambda: "scores of sequences: " + servers.stub_killed(folder / "histories", 10, histories.published).line(),
        lambda: histories.host_lost(folder / "lost", 5).line(),
        lambda: lying.lied(folder / "lying", 20).line(),
        lambda: fresh.changed(folder / "fresh", 60).line(),
        lambda: fresh.hammered(folder / "hammered", 10_000, on_hosts=False).line(),
        lambda: fresh.hammered(folder / "routed", 10_000, on_hosts=True).line(),
    ]
    for made in ("lost", "lying"):
        (folder / made).mkdir()
    for fault in faults:
        figures.append(fault())
        print(figures[-1], file=sys.stderr)
for line in machines.lines():
    figures.append(line)
    print(line, file=sys.stderr)
print("; ".join(figures))
