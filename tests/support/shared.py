"""Requests in which something comes once, and what models themselves answer to them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.support.models import Bags
from tests.support.module_calls import answer_of_call
from tests.support.scored_models import own_scores, random_request


class Ranking(NamedTuple):
    """Items of one user: ids and dense inputs, which the user side has once; and what the module answers by itself."""

    bags: dict[str, Any]
    dense: dict[str, Any]
    right: Mapping[str, Any]


def ranking(module: Any, user_side: Sequence[str], bags: Mapping[str, Bags], dense: Mapping[str, Any]) -> Ranking:
    """A ranking request made of one in which each item has its own user; the first of these is kept.

    Args:
        module: has `arguments(bags, dense)`, which makes a call of it.
        user_side: keys and dense inputs that the items share.
        bags: ids of all keys; at least one item.
        dense: all dense inputs.
    """
    items = len(next(iter(bags.values())))
    users = {key: bag[:1] for key, bag in bags.items() if key in user_side}
    rows = {name: array[:1] for name, array in dense.items() if name in user_side}
    whole = module.arguments(
        {**bags, **{key: bag * items for key, bag in users.items()}},
        {**dense, **{name: np.repeat(array, items, axis=0) for name, array in rows.items()}},
    )
    return Ranking({**bags, **users}, {**dense, **rows}, answer_of_call(module, whole))


def repeated(bags: Mapping[str, Bags], shared: Sequence[str], samples: int) -> dict[str, Bags]:
    return {key: column * samples if key in shared else column for key, column in bags.items()}


def pairs(module: Any, seed: int, samples: int) -> tuple[Any, Any, list[str], Any]:
    """A request whose first key, and first dense input, come once; and the scores that the model itself gives."""
    random = np.random.default_rng(seed)
    (user, user_dense), (bags, dense) = random_request(module, random, 1), random_request(module, random, samples)
    key, *_ = bags
    whole = {**bags, key: user[key] * samples}
    shared = [key]
    if dense and seed % 2:
        name, *_ = dense
        shared.append(name)
        dense = {**dense, name: user_dense[name]}
    spread = {
        name: np.repeat(numbers, samples, axis=0) if name in shared else numbers for name, numbers in dense.items()
    }
    return {**bags, key: user[key]}, dense, shared, own_scores(module, whole, spread)


def assert_scores(scores: Any, expected: Any) -> None:
    assert scores.keys() == expected.keys()
    for name, numbers in expected.items():
        assert scores[name].shape == numbers.shape
        np.testing.assert_allclose(scores[name], numbers, rtol=0, atol=1e-6 * max(1, np.abs(numbers).max()))
