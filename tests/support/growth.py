"""Whether something goes on growing. How much a process keeps for reuse is for the scheduler to say; a leak never stops."""

from collections.abc import Sequence


def keeps_growing(numbers: Sequence[int], by: int = 0) -> bool:
    """Whether each is larger than all before it, by more than `by`: of ten that only vary, one order in 3.6 million is."""
    return all(number > max(numbers[:at]) + by for at, number in enumerate(numbers) if at)
