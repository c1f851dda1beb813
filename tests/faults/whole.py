"""Whole models: faults under a load of scores, and of lookups beside them."""

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from export import ExportConfig, export_model
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.errors import ServerUnavailable
from serving.model.settings import ServingSettings
from tests.faults.tools import asking, wait_until_all_are_answered
from tests.support.raw_id_ranker import DENSE, Whole, random_whole
from tests.support.servers import replace_model_py, running, tbe_serve

CONFIG = ExportConfig(scores=True)
# Scores may be rounded otherwise where requests are merged.
ROUNDING = 1e-5
PATIENCE_S = 120


def publish(folder: Path, seed: int = 0, config: ExportConfig = CONFIG) -> Path:
    """A version of the model `m`."""
    return export_model(Whole(seed).eval(), folder / "r", "m", config)


class Oracle:
    """Requests for scores, and lookups of the same, with the answers of each version by an engine in this process."""

    def __init__(self, bundles: Sequence[Path]) -> None:
        random = np.random.default_rng(0)
        self.requests = [random_whole(random, int(random.integers(1, 20))) for _ in range(16)]
        engines = {int(bundle.name): Engine.open(bundle) for bundle in bundles}
        self.scores = {
            version: [engine.score(*request) for request in self.requests] for version, engine in engines.items()
        }
        self.embeddings = {
            version: [engine.lookup(bags) for bags, _ in self.requests] for version, engine in engines.items()
        }

    def is_right(self, client: LookupClient, number: int) -> bool:
        """Ask for scores, and compare with those of the version that answers; look every other request up, too."""
        bags, dense = self.requests[number]
        scored = client.score(bags, dense)
        scores = self.scores[scored.version][number]
        is_right = scored.keys() == scores.keys() and all(
            np.allclose(scored[name], score, rtol=0, atol=ROUNDING * max(1, np.abs(score).max()))
            for name, score in scores.items()
        )
        if number % 2:
            answer = client.lookup(bags)
            rows = self.embeddings[answer.version][number]
            is_right &= all(np.array_equal(answer[name], row) for name, row in rows.items())
        return is_right


def published(folder: Path) -> Oracle:
    """Publish the model; requests for its scores."""
    return Oracle([publish(folder)])


def cut(file: Path) -> None:
    """By its last byte."""
    file.write_bytes(file.read_bytes()[:-1])


def flipped(file: Path) -> None:
    """One bit of it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def emptied(file: Path) -> None:
    """All of it."""
    file.write_bytes(b"")


def deleted(file: Path) -> None:
    """As an operator would by mistake."""
    file.unlink()


DAMAGES = [
    ("scores.pt", flipped),
    ("scores.pt", cut),
    ("scores.pt", deleted),
    ("ids.bin", flipped),
    ("ids.bin", cut),
    ("ids.bin", emptied),
    ("ids.bin", deleted),
]


@dataclass
class RolledOut:
    """Figures of `damaged_rolled_out`.

    Attributes:
        answers, wrong, failed: what came of the requests under load.
        refused: what `tbe-serve load` said of each damaged version.
        version: the one that answered at last.
    """

    answers: int
    wrong: int
    failed: int
    refused: list[str]
    version: int

    def line(self) -> str:
        return (
            f"{len(self.refused)} damaged versions of a whole model rolled out under load: none was loaded, "
            f"{self.answers:,} answers of the version before, {self.wrong} wrong, {self.failed} failed"
        )


def damaged_rolled_out(folder: Path, damages: Sequence[tuple[str, Callable[[Path], None]]]) -> RolledOut:
    """Roll out, under load, a version for each damage of one of its files, then one that is whole."""
    first = publish(folder)
    good = publish(folder / "good", seed=1)
    oracle, last = Oracle([first]), Oracle([good])
    number = 1 + len(damages) + 1
    oracle.scores[number], oracle.embeddings[number] = last.scores[1], last.embeddings[1]
    refused = []
    with running(folder / "r") as server, asking(server.grpc, oracle, timeout_s=PATIENCE_S) as clients:
        for version, (file, damage) in enumerate(damages, start=2):
            shutil.copytree(good, first.with_name(str(version)))
            damage(first.with_name(str(version)) / file)
            wait_until_all_are_answered(clients)
            done = tbe_serve("load", "m", "--url", server.grpc)
            assert done.returncode == 1, f"{file} {damage.__name__}: it was loaded"
            refused.append(done.stderr)
            wait_until_all_are_answered(clients)
        shutil.copytree(good, first.with_name(str(number)))
        done = tbe_serve("load", "m", "--url", server.grpc)
        assert done.returncode == 0, done.stderr
        wait_until_all_are_answered(clients)
        with LookupClient(server.grpc, "m", PATIENCE_S) as client:
            version = client.score(*oracle.requests[0]).version
    return RolledOut(
        sum(client.right for client in clients),
        sum(client.wrong for client in clients),
        sum(client.failed for client in clients),
        refused,
        version,
    )


SLOW = """
import time
from serving.backend import TritonPythonModel
from serving.lookup.dense_program import DenseProgram

score = DenseProgram.score_all

def slowly(self, *given):
    time.sleep(0.05)
    return score(self, *given)

DenseProgram.score_all = slowly
"""


@dataclass
class Shed:
    """Figures of `shed`: what came of requests for scores that all came at once, and afterwards."""

    right: int
    refused: int
    unexpected: list[str]
    afterwards: int

    def line(self) -> str:
        return (
            f"of {self.right + self.refused + len(self.unexpected)} requests for scores at once {self.right} answered right, "
            f"{self.refused} refused, {len(self.unexpected)} otherwise; then {self.afterwards} of 16 right"
        )


def shed(folder: Path, at_once: int) -> Shed:
    """More requests for scores than are answered in time: a few calls are made, and the others are refused."""
    serving = ServingSettings(max_busy_ms=20, max_call_samples=20)
    bundle = publish(folder, config=replace(CONFIG, serving=serving))
    oracle = Oracle([bundle])
    replace_model_py(bundle, SLOW)
    outcomes: list[bool | Exception] = []
    with (
        running(folder / "r") as server,
        LookupClient(server.grpc, "m", PATIENCE_S, retries=Retries(attempts=1)) as client,
    ):
        barrier = threading.Barrier(at_once)

        def ask(number: int) -> None:
            barrier.wait()
            try:
                outcomes.append(oracle.is_right(client, number % 16 // 2 * 2))
            except Exception as error:
                outcomes.append(error)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(ask, range(at_once)))
        afterwards = sum(oracle.is_right(client, number) for number in range(16))
    refused = [outcome for outcome in outcomes if isinstance(outcome, ServerUnavailable)]
    unexpected = [repr(outcome) for outcome in outcomes if outcome is not True and outcome not in refused]
    return Shed(sum(outcome is True for outcome in outcomes), len(refused), unexpected, afterwards)


def large_message(rows: int) -> bytes:
    """A request for the scores of one sample, with so many rows of a dense input."""
    request = pb.ModelInferRequest(model_name="m")
    for name, datatype, array in (
        ("values", "INT64", np.zeros(0, np.int64)),
        ("lengths", "INT32", np.zeros(6, np.int32)),
        ("price", "FP32", np.zeros((rows, DENSE["price"]), np.float32)),
        ("age", "FP32", np.zeros((1, DENSE["age"]), np.float32)),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, *array.shape])
        request.raw_input_contents.append(array.tobytes())
    content: bytes = request.SerializeToString()
    return content
