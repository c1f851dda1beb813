"""Kill runs of `score_files` at random moments: `python -m tests.support.killed_batches BUNDLE DAY FOLDER KILLS [COLUMN]`.

It prints how many rows were scored in all, how often, how many runs were killed, and how many of these left drafts. One
process imports everything once and forks for each run: to kill a fresh interpreter would mostly hit imports.
"""

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.day import ROW_GROUP, ROWS, contents

ROOT = Path(__file__).parents[2]


def killed(bundle: Path, day: Path, folder: str, kills: int, partition_by: str = "") -> dict[str, Any]:
    """Kill runs in another process, and check that rows were not scored again beyond what kills lose.

    Args:
        bundle: scores them.
        day: `ROWS` rows in row groups of `ROW_GROUP`.
        folder: of the outputs, `whole` and `scores-<number>`: a path or a URL.
        kills: how many.
        partition_by: a column that the outputs are partitioned by.

    Returns:
        What `main` prints.
    """
    command = [sys.executable, "-m", "tests.support.killed_batches", str(bundle), str(day), folder, str(kills)]
    command += [partition_by] if partition_by else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["once"] == ROWS
    assert report["killed"] == kills
    # A kill loses what was scored of one part.
    assert report["rows"] <= report["outputs"] * ROWS + kills * ROW_GROUP
    return report


def kill_folder_runs(bundle: Path, day: Path, folder: Path, kills: int, partition_by: str = "") -> None:
    """As `killed`; and check that each output in the folder is that of a run that was not killed, and all there is."""
    report = killed(bundle, day, str(folder), kills, partition_by)
    for output in range(report["outputs"]):
        assert contents(folder / f"scores-{output}") == contents(folder / "whole")
    assert not [*folder.glob(".*")]


def main(bundle: Path, day: Path, folder: str, kills: int, *partition_by: str) -> None:
    """Start runs and kill them, until `kills` were killed. After a killed run, the next run has the same output; after a
    run that ended by itself, a new one."""
    from serving.batch.run import score_files
    from serving.batch.sources import BundleSource
    from serving.engine import Engine  # noqa: F401  children would import it

    scored = mmap.mmap(-1, 8)  # shared with children

    def rows() -> int:
        return int.from_bytes(scored[:8], "little")

    def start(out: str) -> int:
        if child := os.fork():
            return child
        done_before: list[int] = []

        def progress(done: int, _: int) -> None:
            done_before.append(done)
            new = done - done_before[-2] if len(done_before) > 1 else 0
            scored[:8] = (rows() + new).to_bytes(8, "little")

        status = 1
        try:
            score_files(
                BundleSource(bundle),
                [str(day)],
                out,
                keep=["id", *partition_by],
                partition_by=partition_by,
                progress=progress,
            )
            status = 0
        finally:
            os._exit(status)

    begun = time.monotonic()
    os.waitpid(start(f"{folder}/whole"), 0)
    whole_s = time.monotonic() - begun
    rows_once = rows()
    moments = random.Random(0)
    killed = drafts = output = 0
    while killed < kills:
        out = f"{folder}/scores-{output}"
        child = start(out)
        time.sleep(moments.uniform(0, whole_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        drafts += bool([*Path(folder).glob(".scores-*.scoring/scores/**/.*")])
        output += status == 0
    os.waitpid(start(f"{folder}/scores-{output}"), 0)
    report = {
        "once": rows_once,
        "rows": rows() - rows_once,
        "outputs": output + 1,
        "killed": killed,
        "drafts": drafts,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
