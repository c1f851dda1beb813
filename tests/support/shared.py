"""Requests in which something comes once, and what models themselves answer to them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.models import Bags
from tests.support.scored_models import own_scores, random_request


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
    spread = {name: np.repeat(each, samples, axis=0) if name in shared else each for name, each in dense.items()}
    return {**bags, key: user[key]}, dense, shared, own_scores(module, whole, spread)


def assert_scores(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert found[name].shape == numbers.shape
        np.testing.assert_allclose(found[name], numbers, rtol=0, atol=1e-6 * max(1, np.abs(numbers).max()))
