"""Where bags lie: the same whether bounds are kept or made, for one request or for several."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.requests import layout
from serving.requests.accept import accept
from serving.requests.layout import bag_bounds, segment_bounds
from serving.requests.types import KjtRequest, Tensors
from tests.support.requests import NAMES, schema


@st.composite
def requests(draw: st.DrawFn) -> KjtRequest:
    """A request without ids, in which some features come once."""
    samples = draw(st.integers(0, 4))
    features = draw(st.permutations(NAMES))[: draw(st.integers(1, len(NAMES)))]
    shared = draw(st.lists(st.sampled_from(features), unique=True))
    lengths = np.zeros(sum(1 if name in shared else samples for name in features), np.int32)
    dense = {} if len(shared) < len(features) else {"rows": np.zeros((samples, 1), np.float32)}
    return accept(schema(), Tensors(features, np.zeros(0, np.int64), lengths, shared=shared, dense=dense))


@given(st.lists(requests(), min_size=1, max_size=5))
def test_bounds_of_several_requests_are_those_of_each_one_behind_the_other(several: list[KjtRequest]) -> None:
    expected, end = [0], 0
    for each in several:
        bounds = bag_bounds(len(each.feature_set.names), each.samples, each.shared)
        expected += (bounds[1:] + end).tolist()
        end += each.lengths.size
    assert segment_bounds(several).tolist() == expected
    assert expected[-1] == end


def test_bounds_that_are_kept_cannot_be_changed() -> None:
    kept = bag_bounds(3, 7, None)
    assert kept.tolist() == [0, 7, 14, 21]
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


def test_endless_numbers_of_samples_take_no_endless_memory() -> None:
    for samples in range(2000):
        assert bag_bounds(2, samples, None).tolist() == [0, samples, 2 * samples]
    kept = layout._even_bounds.cache_info()
    assert kept.maxsize is not None
    assert kept.currsize <= kept.maxsize <= 1024
