"""What is put under load: a server, its requests, and one function that does it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from export import ExportConfig, export_model
from serving.bench.generator import Repeat, Traffic, generate
from serving.bench.requests import Distribution, Prepared, prepare, random_requests
from serving.bundle.load import Bundle, open_bundle
from serving.client import LookupClient
from serving.model.settings import ServingSettings
from serving.server import Ports, Server, run_server
from tests.models.registry import example_of, module_of
from tests.support.models import Spec, collection
from tests.support.mutable_tables import changing_nothing
from tests.support.servers import replace_model_py

TABLES = tuple(Spec(f"t{number}", 20_000, 32, "SUM", (f"f{number}",)) for number in range(8))
# The form of a ranker whose scores come from a user's history.
HISTORY = "din"
_DEADLINE_S = 30
# Makes a lookup take as long as on much larger tables, without the cores that the sender needs beside it.
SLOW = """
import time
from serving.backend import TritonPythonModel
from serving.engine import Engine

answer = Engine.answer

def answer_slowly(self, requests):
    time.sleep(sum(request.values.size for request in requests) * {s_per_id})
    return answer(self, requests)

Engine.answer = answer_slowly
"""


@dataclass(frozen=True)
class Served:
    """A server under load."""

    server: Server
    bundle: Bundle
    requests: list[Prepared]

    def load(self, *, clients: int = 0, rate: float = 0.0, seconds: float, repeats: int = 1) -> list[Repeat]:
        """So many clients, or so many requests a second; all answers are checked."""
        load = Traffic(clients=clients, rate=rate, seconds=seconds, repeats=repeats, warm_up_s=0.0, check=1.0)
        return generate(self.server.grpc, self.requests, load, _DEADLINE_S, self.bundle)

    def capacity_per_s(self, seconds: float) -> float:
        """Answers a second to eight clients, each waiting for its answers."""
        self.load(clients=8, seconds=1)
        (run,) = self.load(clients=8, seconds=seconds)
        return len(run.latencies_s) / run.seconds


# Publishes a model of a repository, with some settings.
Publish = Callable[[Path, ServingSettings], Path]


def lookups(repository: Path, settings: ServingSettings) -> Path:
    """A model of eight tables."""
    return export_model(collection(TABLES), repository, "m", ExportConfig(serving=settings))


def fresh(repository: Path, settings: ServingSettings) -> Path:
    """The same as `lookups`, whose rows are written all the time, as they are."""
    return lookups(repository, replace(settings, weights_memory="live"))


def scores(repository: Path, settings: ServingSettings) -> Path:
    """A whole model that scores items by a user's history."""
    config = ExportConfig(scores=True, serving=settings)
    return export_model(module_of(HISTORY), repository, "m", config, example=example_of(HISTORY, 6))


@contextmanager
def serving(
    folder: Path,
    settings: ServingSettings,
    samples: int,
    pooling_factor: float,
    s_per_id: float = 0.0,
    publish: Publish = lookups,
) -> Iterator[Served]:
    """A server on a model, and 64 requests to it: for scores, where it has some.

    Args:
        folder: takes the repository.
        settings: of the model.
        samples, pooling_factor: of a request.
        s_per_id: what a lookup takes longer, for each id.
        publish: makes the model.
    """
    path = publish(folder / "r", settings)
    if s_per_id:
        replace_model_py(path, SLOW.format(s_per_id=s_per_id))
    bundle = open_bundle(path)
    with ExitStack() as stack:
        server = stack.enter_context(
            run_server(folder / "r", Ports(grpc=0, http=0, operations=0), log=folder / "log")
        )
        if publish is fresh:
            stack.enter_context(changing_nothing(path))
        with LookupClient(server.grpc, "m", _DEADLINE_S) as client:
            info = client.info()
        pooling = dict.fromkeys(info.keys, pooling_factor)
        whole = bundle.manifest.dense_part is not None
        requests = random_requests(bundle.manifest, samples, Distribution.parse("zipf:1.05"), pooling, scores=whole)
        yield Served(server, bundle, prepare("m", requests, info))
