"""Candidates that are measured in turn meet the same, or a ratio of two equal ones would not be 1."""

from collections import Counter
from collections.abc import Callable
from itertools import cycle, pairwise

import pytest

from benchmarks.measure import interleave

REQUESTS = range(16)
ROUNDS = 48


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_order_of_candidates_is_balanced_and_adjacent_requests_differ(count: int) -> None:
    calls: list[tuple[str, int]] = []

    def asking(name: str) -> Callable[[], None]:
        requests = cycle(REQUESTS)
        return lambda: calls.append((name, next(requests)))

    names = [f"candidate {number}" for number in range(count)]
    times = interleave({name: asking(name) for name in names}, ROUNDS, warm_up=4)
    assert {name: seconds.shape for name, seconds in times.items()} == dict.fromkeys(names, (ROUNDS,))
    measured = calls[-ROUNDS * count :]
    rounds = [measured[start : start + count] for start in range(0, len(measured), count)]
    assert all(sorted(name for name, _ in one_round) == names for one_round in rounds)
    for position in range(count):
        assert Counter(one_round[position][0] for one_round in rounds) == dict.fromkeys(names, ROUNDS // count)
    for first, last in pairwise(rounds):
        assert len({request for _, request in first}) == count
        just_asked = dict(first)
        assert all(request != just_asked[other] for name, request in last for other in names if other != name)
