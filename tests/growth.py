"""Whether something goes on growing. How much a process keeps for reuse is for the scheduler to say; a leak never stops."""

from collections.abc import Sequence


def keeps_growing(numbers: Sequence[int]) -> bool:
    """Whether each is larger than all before it: of ten that only vary, one order in 3.6 million is."""
    return all(number > max(numbers[:at]) for at, number in enumerate(numbers) if at)
