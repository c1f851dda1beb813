"""Requests that are made up: which ids, and how many."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.bundle import Manifest
from serving.errors import InvalidRequest
from serving.kjt import Ids, Tensors

# Different requests of one size: enough that no cache learns them by heart, few enough to be made in a moment.
_COUNT = 64
_IDS_IN_ALL = 1 << 22
# Hot rows are spread over the table: neighbours by popularity are far apart by id.
_STRIDE = 0.618_033_988_75


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often each id is asked for: all alike where `exponent` is 0, else by Zipf's law.

    The k-th most popular of a table's ids is asked for in proportion to 1 / k^exponent.
    """

    exponent: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Distribution":
        """`uniform`, or `zipf:EXPONENT`, such as zipf:1.05.

        Raises:
            InvalidRequest: it is neither.
        """
        if text == "uniform":
            return cls()
        match = re.fullmatch(r"zipf:([0-9.]+)", text)
        try:
            return cls(float(match[1]))  # type: ignore[index]
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"ids: expected uniform or zipf:EXPONENT, got {text!r}") from error

    def draw(self, random: np.random.Generator, rows: int, count: int) -> Ids:
        """`count` ids in [0, rows)."""
        if self.exponent == 0:
            return random.integers(0, rows, count)
        # A continuous law, inverted and rounded to the nearest rank: sums over 10⁷ rows would buy nothing.
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
) -> list[Tensors]:
    """Requests over all keys of `manifest`.

    Args:
        samples: of each request.
        ids: how often each id is asked for.
        pooling_factors: ids in a bag, by key; bags of 2.3 have 2 or 3, 2.3 on average.
    """
    random = np.random.default_rng(seed)
    rows = manifest.rows_of_keys
    factors = np.array([pooling_factors[key] for key in rows])
    expected = max(1, int(factors.sum() * samples))
    requests = []
    for _ in range(min(_COUNT, max(4, _IDS_IN_ALL // expected))):
        lengths = np.floor(factors[:, np.newaxis] + random.random((factors.size, samples))).astype(np.int32)
        values = np.concatenate(
            [ids.draw(random, height, bags.sum()) for height, bags in zip(rows.values(), lengths, strict=True)]
        )
        requests.append(
            Tensors(None, values, lengths.ravel(), np.ones(values.size, np.float32) if manifest.weighted else None)
        )
    return requests


def _coprime(rows: int) -> int:
    """A stride that meets every row once on its way around the table."""
    stride = max(1, int(rows * _STRIDE))
    while math.gcd(stride, rows) > 1:
        stride += 1
    return stride
