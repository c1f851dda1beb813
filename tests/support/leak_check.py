"""Whether something goes on growing. How much a process keeps for reuse is for the scheduler to say; a leak never stops."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def keeps_growing(numbers: Sequence[int], by: int = 0) -> bool:
    """Whether each is larger than all before it, by more than `by`: of ten that only vary, one order in 3.6 million is."""
    return all(number > max(numbers[:index]) + by for index, number in enumerate(numbers) if index)


@contextmanager
def without_collector() -> Iterator[None]:
    """What cannot be reached from now on stays, if it holds itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
