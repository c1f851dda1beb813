"""Which features are asked for."""

import gc
import itertools
from typing import Any

import numpy as np
import pytest

from serving.errors import InvalidRequest
from serving.requests.schema import FeatureSet, LookupSchema
from tests.support.leak_check import without_collector
from tests.support.requests import NAMES, schema


def test_the_same_names_are_the_same_selection() -> None:
    one = schema()
    assert one.select(["b", "a"]) is one.select(("b", "a"))
    assert one.select(None) is one.select(None)
    assert one.select(NAMES).default
    assert not one.select(["b", "a"]).default


def test_the_cache_of_selections_is_bounded() -> None:
    names = tuple("abcdefgh")
    none: Any = np.zeros(8, np.int64)
    no: Any = np.zeros(8, np.bool_)
    many = LookupSchema(
        FeatureSet(
            names, names, names, np.arange(8), none, none, no, no, none, no, None, none, None, none, none, no, True
        ),
        False,
    )
    before = selections_alive()
    with without_collector():
        for order in itertools.islice(itertools.permutations(names), 5000):
            assert many.select(order).names == order
        assert len(many._selections) <= 1024
        # Those that are not kept go at once: the collector looks at what is old after very many requests.
        assert selections_alive() - before <= 1024


def selections_alive() -> int:
    return sum(type(tracked) is FeatureSet for tracked in gc.get_objects())


def test_an_empty_selection_is_refused_after_any_other() -> None:
    one = schema()
    assert one.subset(()).names == ()
    assert one.subset((2, 0)).names == ("c", "a")
    for select, said in ((one.select, "features: expected at least one"), (one.select_rows, "tables: expected")):
        with pytest.raises(InvalidRequest, match=said):
            select([])
    assert one.select_rows(["tb"]).names == ("tb",)
    for names in (["tb"], ["", "tb"]):
        with pytest.raises(InvalidRequest, match=f"feature '{names[0]}': expected one of"):
            one.select(names)
