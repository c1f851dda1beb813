"""A map over a pool of threads: results in order, in bounded memory (Python 3.14: `Executor.map(buffersize=…)`)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], *, ahead: int
) -> Iterator[R]:
    """Yield `function(item)` of each item, in order. At most `ahead` results are computed before they are needed."""
    results: deque[Future[R]] = deque()
    for item in items:
        results.append(pool.submit(function, item))
        if len(results) > ahead:
            yield results.popleft().result()
    while results:
        yield results.popleft().result()
