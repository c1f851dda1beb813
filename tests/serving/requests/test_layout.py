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
def test_bounds_of_several_requests_are_concatenated(several: list[KjtRequest]) -> None:
    expected, end = [0], 0
    for request in several:
        bounds = bag_bounds(len(request.feature_set.names), request.samples, request.shared)
        expected += (bounds[1:] + end).tolist()
        end += request.lengths.size
    assert segment_bounds(several).tolist() == expected
    assert expected[-1] == end


def test_cached_bounds_are_read_only() -> None:
    cached = bag_bounds(3, 7, None)
    assert cached.tolist() == [0, 7, 14, 21]
    with pytest.raises(ValueError, match="read-only"):
        cached[0] = 1


def test_the_cache_of_bounds_is_bounded() -> None:
    for samples in range(2000):
        assert bag_bounds(2, samples, None).tolist() == [0, samples, 2 * samples]
    info = layout._even_bounds.cache_info()
    assert info.maxsize is not None
    assert info.currsize <= info.maxsize <= 1024
