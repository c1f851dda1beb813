"""Kill runs of `score_files` at random moments: `python -m tests.support.killed_batches BUNDLE DAY FOLDER KILLS`.

It prints how many rows were scored in all, how often, how many runs were killed, and how many of these left drafts. One
process imports everything once and forks for each run: to kill a fresh interpreter would mostly hit imports.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

from serving.batch.run import score_files
from serving.batch.sources import BundleSource
from serving.engine import Engine  # noqa: F401  children would import it


def main(bundle: Path, day: Path, folder: Path, kills: int) -> None:
    """Kill runs until so many are killed. A killed run is started again; the one after a whole run has another output."""
    scored = mmap.mmap(-1, 8)  # shared with children

    def rows() -> int:
        return int.from_bytes(scored[:8], "little")

    def start(out: Path) -> int:
        if child := os.fork():
            return child
        done_before: list[int] = []

        def progress(done: int, _: int) -> None:
            done_before.append(done)
            new = done - done_before[-2] if len(done_before) > 1 else 0
            scored[:8] = (rows() + new).to_bytes(8, "little")

        status = 1
        try:
            score_files(BundleSource(bundle), [str(day)], out, keep=["id"], progress=progress)
            status = 0
        finally:
            os._exit(status)

    begun = time.monotonic()
    os.waitpid(start(folder / "whole"), 0)
    whole_s = time.monotonic() - begun
    once = rows()
    moments = random.Random(0)
    killed = drafts = output = 0
    while killed < kills:
        out = folder / f"scores-{output}"
        child = start(out)
        time.sleep(moments.uniform(0, whole_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        drafts += bool([*folder.glob(".scores-*.scoring/scores/.*")])
        output += status == 0
    os.waitpid(start(folder / f"scores-{output}"), 0)
    report = {"once": once, "rows": rows() - once, "outputs": output + 1, "killed": killed, "drafts": drafts}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
