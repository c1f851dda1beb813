"""Callers of a router, and what they met."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serving.client import LookupClient, Retries
from serving.errors import ServingError
from tests.faults.hosts.fleet import PATIENCE_S, Asked, Fleet
from tests.support.host_faults import same
from tests.support.hosts import MODEL

CLIENTS = 4
IN_A_ROW = 100


@dataclass
class Seen:
    """What callers met, each with the moment when it came and the time that it took, in seconds."""

    right: list[float] = field(default_factory=list)
    wrong: list[float] = field(default_factory=list)
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def failed_between(self, begin: float, end: float) -> int:
        return sum(begin <= failed_s < end for failed_s, _, _ in self.failed)


@contextmanager
def asking(address: str, requests: Sequence[Asked]) -> Iterator[Seen]:
    """Callers that ask all the time. An answer is right if it is that of the version that it names, bit for bit.

    Raises:
        SystemExit: one was not.
    """
    results, ended = Seen(), threading.Event()

    def ask() -> None:
        with single_attempt(address) as client:
            while not ended.is_set():
                for request, answers in requests:
                    started = time.monotonic()
                    try:
                        answer = client.lookup(request)
                    except ServingError as error:
                        now = time.monotonic()
                        results.failed.append((now, now - started, str(error)))
                    else:
                        now = time.monotonic()
                        is_right = answer.version in answers and same(answer, answers[answer.version])
                        (results.right if is_right else results.wrong).append(now)
                        results.took.append(now - started)

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if results.wrong:
        raise SystemExit(
            f"{len(results.wrong)} of {len(results.took)} answers are not those of the version that they name"
        )


def single_attempt(address: str) -> LookupClient:
    """A client that tries nothing again."""
    return LookupClient(address, MODEL, 10, retries=Retries(attempts=1))


def until_back(fleet: Fleet) -> None:
    """Until every instance of the router reaches every host: IN_A_ROW lookups succeed."""
    end = time.monotonic() + PATIENCE_S
    (request, _), *_ = fleet.requests(1)
    in_a_row = 0
    with single_attempt(fleet.router.grpc) as client:
        while in_a_row < IN_A_ROW:
            try:
                client.lookup(request)
                in_a_row += 1
            except ServingError:
                if time.monotonic() > end:
                    raise
                in_a_row = 0
                time.sleep(0.05)
