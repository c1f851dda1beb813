"""Callers that send lookups to a router all the time, and the outcomes."""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.hosts.dlrm import IDS_PER_SAMPLE, ROWS
from examples.hosts.model import CAP, MODEL, SMALL
from serving.client import LookupClient, Retries
from serving.errors import ServingError

SAMPLES = 16
# Pause between two lookups of a caller, in seconds: the machine has other work, such as an export.
PAUSE_S = 0.05


@dataclass
class Outcomes:
    """The outcomes of lookups in a period of time."""

    answers: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)

    def line(self) -> str:
        """One line of text."""
        by_version = ", ".join(f"{count:,} of version {version}" for version, count in sorted(self.answers.items()))
        median = f"{1000 * np.median(self.took_s):.1f} ms" if self.took_s else "no"
        refused = f"{self.errors.total()} refused"
        for message, _ in self.errors.most_common(1):
            refused += f", most of them: `{message}`"
        return f"{by_version or 'no'} answers, p50 {median}; {self.wrong} wrong or mixed; {refused}"


def requests() -> list[dict[str, Any]]:
    """Requests of SAMPLES samples, with as many ids for each feature as DLRM-v2's have."""
    random = np.random.default_rng(0)
    return [
        {
            f"f{number}": (
                random.integers(0, min(rows, CAP), SAMPLES * ids),
                np.full(SAMPLES, ids, np.int32),
            )
            for number, (rows, ids) in enumerate(zip(ROWS, IDS_PER_SAMPLE, strict=True))
        }
        for _ in range(4)
    ]


class Callers:
    """Callers that send requests all the time. All answers of a version to a request must equal the first one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._requests = requests()
        self._small = {name for name, rows in zip(self._requests[0], ROWS, strict=True) if rows <= SMALL}
        self._first_answers: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._current, self._lock, self._ended = Outcomes(), threading.Lock(), threading.Event()
        self._small_answered = 0
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(2)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def window(self) -> Outcomes:
        """The outcomes since the last call."""
        with self._lock:
            finished, self._current = self._current, Outcomes()
            return finished

    def refused(self) -> int:
        """How many requests were refused since `window` was called."""
        return self._current.errors.total()

    def answered(self, version: int) -> int:
        """How many requests a version answered since `window` was called."""
        return self._current.answers[version]

    def small_answered(self) -> int:
        """How many requests for the router's own tables were answered so far."""
        return self._small_answered

    def _ask(self, number: int) -> None:
        with LookupClient(self._address, MODEL, 5, retries=Retries(attempts=1)) as client:
            while not self._ended.is_set():
                for index, request in enumerate(self._requests):
                    small = number == 1 and index % 2 == 1
                    tables = {name: request[name] for name in self._small} if small else request
                    self._one(client, index, tables, small)
                    time.sleep(PAUSE_S)

    def _one(self, client: LookupClient, index: int, request: Mapping[str, Any], small: bool) -> None:
        started = time.monotonic()
        try:
            answer = client.lookup(request)
        except ServingError as error:
            with self._lock:
                self._current.errors[str(error)] += 1
            return
        with self._lock:
            first_answer = self._first_answers.setdefault((answer.version, index + 100 * small), answer)
            is_same = all(answer[name].tobytes() == first_answer[name].tobytes() for name in first_answer)
            self._current.answers[answer.version] += 1
            self._current.wrong += not is_same
            self._current.took_s.append(time.monotonic() - started)
            self._small_answered += small
