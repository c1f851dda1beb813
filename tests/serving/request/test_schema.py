"""Which features are asked for."""

import itertools
from typing import Any

import numpy as np

from serving.request.schema import Schema, Selection
from tests.support.requests import NAMES, schema


def test_the_same_names_are_the_same_selection() -> None:
    one = schema()
    assert one.select(["b", "a"]) is one.select(("b", "a"))
    assert one.select(None) is one.select(None)
    assert one.select(NAMES).default
    assert not one.select(["b", "a"]).default


def test_endless_orders_of_features_take_no_endless_memory() -> None:
    names = tuple("abcdefgh")
    none: Any = np.zeros(8, np.int64)
    many = Schema(
        Selection(
            names, names, names, np.arange(8), none, none, none, none, none, none, None, none, None, none, none, True
        ),
        False,
    )
    for order in itertools.islice(itertools.permutations(names), 5000):
        assert many.select(order).names == order
    assert len(many._selections) <= 1024
