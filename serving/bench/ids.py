"""Random requests: which ids, and how many."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from serving.bundle.manifest import Manifest
from serving.errors import ConfigurationError
from serving.request.tensors import Ids, Tensors

# How many different requests of one size are made: enough that no cache holds them all, few enough to be quick.
_COUNT = 64
# The most ids in all of them.
_IDS_IN_ALL = 1 << 22
# Of the ids of a map that knows none, so many are drawn from.
_MOST_DRAWN = 1 << 31
# Ids that follow one another in popularity are this share of the table apart.
_STRIDE = 0.618_033_988_75


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often each id of a table is asked for.

    The k-th most popular id is asked for in proportion to 1 / k^exponent: Zipf's law. With exponent 0 all ids are
    asked for equally often.
    """

    exponent: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        """`uniform`, or `zipf:EXPONENT`, such as zipf:1.05.

        Raises:
            ConfigurationError: it is neither.
        """
        if text == "uniform":
            return cls()
        match = re.fullmatch(r"zipf:([0-9.]+)", text)
        try:
            return cls(float(match[1]))  # type: ignore[index]
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"ids: expected uniform or zipf:EXPONENT, got {text!r}") from error

    def draw(self, random: np.random.Generator, rows: int, count: int) -> Ids:
        """Ids in [0, rows): int64 [count]."""
        if self.exponent == 0:
            return random.integers(0, rows, count)
        # The continuous law, inverted, and rounded to the nearest rank. Exact sums over 10⁷ rows take too long.
        uniform, power = random.random(count), 1 - self.exponent
        low, high = 0.5, rows + 0.5
        if power == 0:
            drawn = low * (high / low) ** uniform
        else:
            drawn = (low**power + uniform * (high**power - low**power)) ** (1 / power)
        popularity = np.clip(np.rint(drawn), 1, rows).astype(np.int64) - 1
        ids: Ids = popularity * _coprime(rows) % rows
        return ids


def random_requests(
    manifest: Manifest,
    samples: int,
    ids: Distribution,
    pooling_factors: Mapping[str, float],
    seed: int = 0,
    known: Mapping[str, Ids] = MappingProxyType({}),
    *,
    scores: bool = False,
) -> list[Tensors]:
    """Random requests for all keys of `manifest`.

    Args:
        manifest: the bundle's: its tables say which ids there are.
        samples: samples of each request.
        ids: how often each id is asked for.
        pooling_factors: ids in a bag, by key. A bag of 2.3 has 2 or 3 ids, on average 2.3.
        seed: of the random numbers.
        known: ids that are drawn from, by key, where ids are not row numbers.
        scores: whether they ask for all scores, with dense inputs in [0, 1), instead of embeddings.

    Raises:
        ConfigurationError: the bundle has no scores to ask for.
    """
    part = manifest.dense_part if scores else None
    if scores and part is None:
        raise ConfigurationError("scores: expected a bundle with scores: export the model with --scores")
    random = np.random.default_rng(seed)
    rows = manifest.rows_of_keys
    factors = np.array([pooling_factors[key] for key in rows])
    longest = manifest.longest_bags
    expected = max(1, int(factors.sum() * samples))
    requests = []
    for _ in range(min(_COUNT, max(4, _IDS_IN_ALL // expected))):
        lengths = np.floor(factors[:, np.newaxis] + random.random((factors.size, samples))).astype(np.int32)
        for bags, key in zip(lengths, rows, strict=True):
            if key in longest:
                np.minimum(bags, longest[key], out=bags)
        values = np.concatenate(
            [
                _drawn(random, ids, known.get(key), height, bags.sum())
                for (key, height), bags in zip(rows.items(), lengths, strict=True)
            ]
        )
        weights = np.ones(values.size, np.float32) if manifest.weighted else None
        request = Tensors(None, values, lengths.ravel(), weights)
        if part is not None:
            request.outputs = [each.name for each in part.outputs]
            request.dense = {each.name: random.random((samples, each.width), np.float32) for each in part.inputs}
        requests.append(request)
    return requests


def _drawn(random: np.random.Generator, ids: Distribution, known: Ids | None, height: int, count: int) -> Ids:
    """Ids in [0, height), or of those that are known: int64 [count]."""
    if known is None or not known.size:
        return ids.draw(random, min(height, _MOST_DRAWN), count)
    drawn: Ids = known[ids.draw(random, known.size, count)]
    return drawn


def _coprime(rows: int) -> int:
    """A stride that visits every row once on its way around the table."""
    stride = max(1, int(rows * _STRIDE))
    while math.gcd(stride, rows) > 1:
        stride += 1
    return stride
