"""What several rounds of measuring say together."""

import numpy as np
import pytest

from export.compare.measure import CONFIDENCE, summarize
from serving.bench.report import Figure


def test_a_ratio_compares_times_of_the_same_round() -> None:
    """Rounds in which the machine is up to fifty times slower: the placement takes twice as long in each."""
    calls = np.array([[2, 1, 0.5, 1, 0.5]] * 4, np.float64)
    rounds = [calls * slow for slow in (1, 1, 1, 2, 3, 5, 8, 20, 50)]
    times = summarize(rounds)
    assert times.over_one_rank == Figure(2, 2, 2)
    assert times.side_by_side_over_one_rank == Figure(2, 2, 2)
    assert times.latency_s == Figure(6, 2, 40)
    assert times.one_rank_s == Figure(3, 1, 20)


def test_an_interval_holds_the_median_as_often_as_stated() -> None:
    random = np.random.default_rng(0)
    rounds = np.ones((2000, 9, 1, 5))
    rounds[..., 0] = random.lognormal(size=(2000, 9, 1))
    intervals = [summarize(list(ratios)).over_one_rank for ratios in rounds]
    assert np.mean([interval.low <= 1 <= interval.high for interval in intervals]) == pytest.approx(
        CONFIDENCE, abs=0.02
    )
