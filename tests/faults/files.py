"""Files of a bundle that change under the server that has them open, and publishers that meet."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serving.bundle.load import open_bundle, verify_digests
from serving.client import LookupClient, Retries
from serving.errors import ServingError
from tests.faults.tools import Oracle, publish, python
from tests.support.long_cases import BREATH_S
from tests.support.servers import running, stubs

WEIGHTS = "weights.0.bin"


def deleted(weights: Path) -> None:
    """As an operator would by mistake."""
    weights.unlink()


def replaced(weights: Path) -> None:
    """By another file of the same size, at once."""
    other = weights.with_name("other")
    other.write_bytes(bytes(weights.stat().st_size))
    other.replace(weights)


def truncated(weights: Path) -> None:
    """In place: pages that are mapped are gone."""
    os.truncate(weights, 0)


def overwritten(weights: Path) -> None:
    """In place, as long as before."""
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))


@dataclass
class Changed:
    """Figures of `weights_change`.

    Attributes:
        right, refused, wrong: what came of twenty lookups after the change;
        after: what came of those after them, while the model was loaded anew.
        said: what `tbe-serve run` said, and `code`, how it ended.
    """

    right: int
    refused: int
    wrong: int
    after: list[str]
    said: str
    code: int


def weights_change(folder: Path, change: Callable[[Path], None], *, kill: bool) -> Changed:
    """Change the weights of a version under the server that serves it, look up, and have the model loaded anew.

    Args:
        kill: the model's process, which does not end by itself.
    """
    bundle = publish(folder)
    oracle = Oracle(bundle)
    counts = {"right": 0, "refused": 0, "wrong": 0}
    after: list[str] = []

    def ask(client: LookupClient) -> str:
        try:
            return "right" if oracle.is_right(client, 0) else "wrong"
        except ServingError:
            return "refused"

    with (
        running(folder / "r") as server,
        LookupClient(server.grpc, "m", 20, retries=Retries(attempts=1)) as client,
    ):
        assert ask(client) == "right"
        change(bundle / WEIGHTS)
        for _ in range(20):
            counts[ask(client)] += 1
        for stub in stubs(server.triton, "m") if kill else ():
            stub.kill()
        # It cannot be loaded anew: the command ends, and says why.
        while server.process.poll() is None:
            after.append(ask(client))
            time.sleep(BREATH_S)
        assert server.process.stderr is not None
        return Changed(**counts, after=after, said=server.process.stderr.read(), code=server.process.returncode)


# To import what an export needs takes longer than to export: one process does, and forks the publishers.
PUBLISH = """
import os, sys
from export import export_model
from tests.support.models import SUM, collection
from tests.support.reload_process import in_this_process

repository, publishers, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
children = []
for _ in range(publishers):
    child = os.fork()
    if not child:
        break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))
with in_this_process():
    for _ in range(count):
        print(export_model(collection(SUM), repository, "m"), flush=True)
"""


def published_at_once(folder: Path, publishers: int, count: int) -> list[Path]:
    """The versions of so many processes, each of which publishes so many; every byte of them was read."""
    process = python("-c", PUBLISH, str(folder / "r"), str(publishers), str(count))
    out, err = process.communicate(timeout=300)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, out, err)
    bundles = [Path(line) for line in out.splitlines()]
    for bundle in bundles:
        verify_digests(open_bundle(bundle))
    return bundles
