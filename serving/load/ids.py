"""Which ids a made-up request asks for."""

import math
import re
from dataclasses import dataclass

import numpy as np

from serving.errors import InvalidRequest
from serving.kjt import Ids

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


def _coprime(rows: int) -> int:
    """A stride that meets every row once on its way around the table."""
    stride = max(1, int(rows * _STRIDE))
    while math.gcd(stride, rows) > 1:
        stride += 1
    return stride
