"""Kill exports at random moments: `python -m tests.support.killed_exports FOLDER TIMES`, which prints what was found.

One process imports everything once and forks for each export; killing a fresh interpreter would mostly hit imports.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from export import ExportConfig, Sharding, export_model
from serving.bundle.load import open_bundle, verify_digests
from tests.support.models import Spec, collection
from tests.support.reload_process import in_this_process

SPECS = (Spec("t", 200_000, 32, "SUM", ("x",)), Spec("u", 1_000, 32, "MEAN", ("y",)))
CONFIG = ExportConfig(sharding=Sharding(ranks=3, types={"t": "row_wise", "u": "column_wise"}))


def main(folder: Path, times: int) -> None:
    """Kill, look, and go on; a last export is left alone."""
    module = collection(SPECS)
    repository = folder / "repository"

    def start() -> int:
        if child := os.fork():
            return child
        try:
            with in_this_process():
                export_model(module, repository, "m", CONFIG)
        finally:
            os._exit(0)

    begun = time.monotonic()
    os.waitpid(start(), 0)
    whole_s = time.monotonic() - begun
    first = contents(repository / "m" / "1")

    moments = random.Random(0)
    drafts = tries = 0
    while (
        tries < times or drafts < times // 5
    ):  # while they write; how long an export takes, others on the machine have a say in
        tries += 1
        child = start()
        time.sleep(moments.uniform(0, 1.1 * whole_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        drafts += bool(list(folder.glob(".repository.draft-*")))
        for version in versions(repository):
            verify_digests(open_bundle(repository / "m" / version))
        assert contents(repository / "m" / "1") == first
        assert {path.name for path in repository.iterdir()} == {"m"}
    os.waitpid(start(), 0)
    names_left = [path.name for path in folder.iterdir() if path != repository]
    print(json.dumps({"drafts": drafts, "tries": tries, "left": names_left}))


def versions(repository: Path) -> set[str]:
    """What is in the model's folder besides its config."""
    return {path.name for path in (repository / "m").iterdir()} - {"config.pbtxt"}


def contents(bundle: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was last changed, and to what."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in bundle.iterdir()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
