"""Clients that look at rows all the time, in a process of their own. It imports no export, which takes seconds.

Every element of a row shows the number of the delta that changed it last.
"""

import threading
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.client import LookupClient
from serving.errors import ServingError

# FP16 holds every number up to 2,048, and a scale of 0 every row of equal numbers. So numbers go round.
ROUND = 2000
# Rows of each table that are read.
READ = 100
# The feature of each table.
FEATURES = {"int8": "x", "columns": "y", "rows": "z", "int4": "u", "int2": "v"}


def all_rows(client: LookupClient) -> dict[str, npt.NDArray[np.float32]]:
    """The first rows of each table, each [rows, dim]."""
    answer = client.lookup({feature: np.arange(READ).reshape(-1, 1) for feature in FEATURES.values()})
    return {table: np.asarray(answer[feature], np.float32) for table, feature in FEATURES.items()}


def read_until_stopped(
    url: str, model: str, newest: Any, clients: int, ready: Event, stopped: Event, figures: Any
) -> None:
    """Read until it is stopped, then put figures, as of `tests.faults.fresh.Seen`, into a queue.

    Args:
        url, model: whom to ask.
        newest: the number of the newest delta, shared.
        clients: how many ask at once.
        ready: is set when they begin.
        stopped: ends it.
        figures: the queue.
    """
    counts = dict.fromkeys(("reads", "refused", "torn", "backwards", "too_new"), 0)
    one_at_a_time = threading.Lock()

    def look() -> None:
        before = {table: np.zeros(READ, np.float32) for table in FEATURES}
        with LookupClient(url, model, 2) as client:
            while not stopped.wait(0.01):
                try:
                    rows_by_table = all_rows(client)
                except ServingError:
                    with one_at_a_time:
                        counts["refused"] += 1
                    continue
                now = np.full(READ, newest.value % ROUND, np.float32)
                with one_at_a_time:
                    counts["reads"] += 1
                    for table, rows in rows_by_table.items():
                        counts["torn"] += int((rows != rows[:, :1]).any(axis=1).sum())
                        counts["backwards"] += _older(rows[:, 0], before[table])
                        counts["too_new"] += _older(now, rows[:, 0])
                before = {table: rows[:, 0] for table, rows in rows_by_table.items()}

    threads = [threading.Thread(target=look) for _ in range(clients)]
    for thread in threads:
        thread.start()
    ready.set()
    for thread in threads:
        thread.join()
    figures.put(counts)


def _older(numbers: npt.NDArray[np.float32], earlier: npt.NDArray[np.float32]) -> int:
    """How many numbers come before the others, where numbers go round."""
    return int(((numbers - earlier) % ROUND >= ROUND / 2).sum())
