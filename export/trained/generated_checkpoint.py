"""A checkpoint of generated rows: tables of any size that take 16 MiB, for benchmarks, studies and tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from export.trained.checkpoint import Checkpoint
from export.trained.tables import TrainedTable

# Number of floats in the pool that generated rows are windows of: 16 MiB, so that reading a row costs as much as from
# memory. Knuth's multiplicative hash: neighbouring rows are windows far apart.
_POOL, _STEP = 1 << 22, 2_654_435_761


@dataclass(frozen=True, slots=True)
class GeneratedTable:
    """A table [rows, dim] of windows of `pool`, float32 [n].

    Row r is the window of dim floats that starts at (r · _STEP + seed) mod (n − dim + 1).
    """

    shape: tuple[int, int]
    pool: Tensor
    seed: int
    dtype: torch.dtype = field(default=torch.float32, init=False)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as float32 [stop − start, dim]."""
        return self.rows(torch.arange(start, stop))

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, int64 [n], as float32 [n, dim]."""
        windows = self.pool.as_strided((self.pool.numel() - self.shape[1] + 1, self.shape[1]), (1, 1))
        return windows.index_select(0, (ids * _STEP + self.seed).remainder(len(windows)))


def generated_checkpoint(tables: Sequence[TrainedTable]) -> Checkpoint:
    """Normally distributed floats for `tables`, the same ones every time."""
    return Checkpoint(
        "generated",
        {
            table.key: GeneratedTable((table.rows, table.dim), _pool(), seed=1_000_003 * number)
            for number, table in enumerate(tables)
        },
    )


@cache
def _pool() -> Tensor:
    """The floats that all generated tables share, float32 [_POOL]."""
    return torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.05)
