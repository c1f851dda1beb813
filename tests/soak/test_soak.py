"""Load, and more load than there is capacity: what holds however fast the machine is. Figures are `make soak`'s to tell."""

from pathlib import Path

import psutil
import pytest

from serving.model.settings import ServingSettings
from tests.soak.overload import BUSY_MS, CALL_IDS, POOLING_FACTOR, S_PER_ID, SAMPLES
from tests.soak.served import Publish, fresh, lookups, scores, serving
from tests.soak.soak import Held, growth
from tests.support.leak_check import keeps_growing
from tests.support.long_cases import one_in

ROUNDS = 10
NOISE_BYTES = 256 << 10


@pytest.mark.promise("At 80 % of capacity all answers are right, and memory, descriptors and threads stop growing")
@pytest.mark.parametrize(("publish", "seconds"), one_in(3, [(fresh, 0.3), (lookups, 0.7), (scores, 0.7)]))
def test_answers_are_right_and_growth_stops_under_load(publish: Publish, seconds: float, tmp_path: Path) -> None:
    """Eight clients that wait for their answers: no queue grows with the speed of the machine."""
    settings = ServingSettings(max_busy_ms=60_000)
    with serving(tmp_path, settings, samples=128, pooling_factor=5, publish=publish) as served:
        triton = psutil.Process(served.server.process.pid)
        processes = {child: Held() for child in (triton, *triton.children(recursive=True))}
        for _ in range(ROUNDS):
            (run,) = served.load(clients=8, seconds=seconds)
            assert run.wrong == []
            assert run.errors == {}
            assert run.checked == len(run.latencies_s) > 0
            for process, usage in processes.items():
                usage.look([process])
    assert len(processes) == 2
    for usage in processes.values():
        assert not keeps_growing(usage.memory_bytes, NOISE_BYTES), usage.memory_bytes
        assert not keeps_growing(usage.descriptors), usage.descriptors
        assert not keeps_growing(usage.threads), usage.threads


@pytest.mark.promise(
    "At three times the capacity excess requests are refused as UNAVAILABLE, and the others are answered soon"
)
def test_overload_is_refused_by_type_and_recovered_from(tmp_path: Path) -> None:
    """Four hundred wait all the time, for a model that takes at least 4 ms for each: on a slow machine it is worse."""
    settings = ServingSettings(max_busy_ms=BUSY_MS, max_call_ids=CALL_IDS)
    with serving(tmp_path, settings, SAMPLES, POOLING_FACTOR, S_PER_ID) as served:
        (much,) = served.load(clients=400, seconds=3)
        (after,) = served.load(clients=1, seconds=1)
    assert much.wrong == after.wrong == []
    assert much.errors.keys() == {"ServerUnavailable"}  # nothing waits until its deadline
    assert much.checked == len(much.latencies_s) > 0
    assert after.errors == {}
    assert after.checked > 0


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], True),
        ([1, 2, 3, 4, 5, 5, 5, 5, 5, 5], False),
        ([5, 9, 6, 8, 7], False),
        ([3, 3, 3], False),
    ],
)
def test_growth_that_stops_is_distinguished_from_a_leak(numbers: list[int], expected: bool) -> None:
    assert keeps_growing(numbers) is expected


def test_growth_is_measured_between_the_ends_of_a_run() -> None:
    assert growth([0] * 10 + [7] * 80 + [19] * 10) == 12
    assert growth([3] * 100) == 0
