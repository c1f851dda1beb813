"""A bundle, and clients that know what its answers have to be."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from export import ExportConfig, export_model
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.errors import ServingError
from tests.support.long_cases import BREATH_S
from tests.support.models import SUM, collection, random_bags

Bags = dict[str, Any]
PATIENCE_S = 120


def publish(folder: Path, seed: int = 0, config: ExportConfig | None = None) -> Path:
    """A version of the model `m`."""
    return export_model(collection(SUM, seed=seed), folder / "r", "m", config)


class Asked(Protocol):
    """Requests, by number, and whether a server's answers to them are right."""

    @property
    def requests(self) -> Sequence[Any]:
        """All of them."""

    def is_right(self, client: LookupClient, number: int) -> bool:
        """Ask, and compare."""


def published(folder: Path) -> "Oracle":
    """Publish the model `m`; lookups of it."""
    return Oracle(publish(folder))


class Oracle:
    """Requests, and the answers of each version, by an engine in this process."""

    def __init__(self, *bundles: Path) -> None:
        random = np.random.default_rng(0)
        self.requests: list[Bags] = [dict(random_bags(random, SUM, int(random.integers(1, 20)))) for _ in range(16)]
        engines = {int(bundle.name): Engine.open(bundle) for bundle in bundles}
        self.answers = {
            version: [engine.lookup(bags) for bags in self.requests] for version, engine in engines.items()
        }

    def is_right(self, client: LookupClient, number: int) -> bool:
        """Ask, and compare bit for bit with the answer of the version that the server names."""
        answer = client.lookup(self.requests[number])
        expected = self.answers[answer.version][number]
        return all(np.array_equal(answer[name], rows) for name, rows in expected.items())


@dataclass
class Seen:
    """What clients met."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    last_failure: float = 0.0
    errors: set[str] = field(default_factory=set)


@contextmanager
def asking(
    url: str, oracle: Asked, clients: int = 4, timeout_s: float = 1.0, retries: Retries | None = None
) -> Iterator[list[Seen]]:
    """Clients that ask all the time, each with what it has seen so far."""
    results, stopped = [Seen() for _ in range(clients)], threading.Event()

    def ask(mine: Seen) -> None:
        with LookupClient(url, "m", timeout_s, retries=retries) as client:
            while not stopped.wait(BREATH_S):
                for number in range(len(oracle.requests)):
                    try:
                        if oracle.is_right(client, number):
                            mine.right += 1
                        else:
                            mine.wrong += 1
                    except ServingError as error:
                        mine.failed += 1
                        mine.last_failure = time.monotonic()
                        mine.errors.add(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in results]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def wait_until_all_are_answered(clients: Sequence[Seen]) -> float:
    """Until each client has had another right answer; how long it took."""
    before, started = [client.right for client in clients], time.monotonic()
    while any(client.right <= was for client, was in zip(clients, before, strict=True)):
        assert time.monotonic() < started + PATIENCE_S, [client.errors for client in clients]
        time.sleep(0.01)
    return time.monotonic() - started


def python(*arguments: str) -> "subprocess.Popen[str]":
    """Another interpreter like this one."""
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
