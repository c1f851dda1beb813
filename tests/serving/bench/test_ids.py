"""Ids that are drawn for a load."""

import numpy as np
import pytest

from serving.bench.requests import Distribution
from serving.errors import ConfigurationError


@pytest.mark.parametrize("rows", [1, 2, 7, 1000, 1024, 40_000_000])
def test_ids_are_within_the_table(rows: int) -> None:
    random = np.random.default_rng(0)
    for text in ("uniform", "zipf:0.8", "zipf:1", "zipf:1.2"):
        ids = Distribution.parse(text).draw(random, rows, 10_000)
        assert ids.dtype == np.int64
        assert 0 <= ids.min() <= ids.max() < rows


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.3])
def test_popularity_follows_zipf_s_law(exponent: float) -> None:
    """The continuous law that ids are drawn by is close to the exact one, worked out by summing."""
    rows, count = 1000, 400_000
    ids = Distribution(exponent).draw(np.random.default_rng(1), rows, count)
    cumulative = np.sort(np.bincount(ids, minlength=rows))[::-1].cumsum() / count
    exact = np.arange(1, rows + 1) ** -exponent
    exact = exact.cumsum() / exact.sum()
    for top in (10, 100, 500):
        assert cumulative[top - 1] == pytest.approx(exact[top - 1], abs=0.02)
    hottest = np.argsort(np.bincount(ids, minlength=rows))[::-1][:10]
    assert np.ptp(hottest) > rows / 2  # not side by side


@pytest.mark.parametrize("text", ["zipf", "zipf:", "zipf:-1", "normal", ""])
def test_an_invalid_distribution_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected uniform or zipf:EXPONENT"):
        Distribution.parse(text)
