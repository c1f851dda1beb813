"""What a bundle should answer: its rows unpacked and pooled by numpy in float64. Shares no code with the program."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle import DefaultRow, IdPolicy, Manifest, OutputDtype, Pooling, Table, WeightDtype
from serving.dequantize import FP16_SUBNORMAL, FP16_UNIT, FP32_UNIT, Bytes, dequantize
from serving.kjt import Ids, Tensors
from serving.plan import Shard

Doubles = npt.NDArray[np.float64]
# Rows are unpacked so many numbers at a time: a large request takes no more memory than its answer.
_NUMBERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a request, and how far FP32 summation may be from it, by feature [B, dim].

    Where a sum may leave the range of its dtype, the bound is infinite.
    """

    features: Sequence[str]
    answers: Sequence[Doubles]
    bounds: Sequence[Doubles]

    @property
    def answer(self) -> Doubles:
        """All features side by side [B, D]."""
        return np.concatenate(self.answers, axis=1)

    @property
    def bound(self) -> Doubles:
        """Those of all features side by side [B, D]."""
        return np.concatenate(self.bounds, axis=1)

    def misses(self, answer: npt.NDArray[Any]) -> Iterator[tuple[str, float]]:
        """The features whose columns of `answer` [B, D] are further off than rounding explains, and how far."""
        end = 0
        for name, expected, bound in zip(self.features, self.answers, self.bounds, strict=True):
            start, end = end, end + bound.shape[1]
            error = np.abs(answer[:, start:end].astype(np.float64) - expected)
            if not ((error <= bound) | np.isinf(bound)).all():
                yield name, float(error.max(initial=0.0))


def pool(directory: Path, manifest: Manifest, request: Tensors) -> Pooled:
    """Answer `request`, which the bundle in `directory` accepts, in float64 from the stored bytes."""
    tables = {table.name: table for table in manifest.tables}
    keys = manifest.keys if request.features is None else {key: manifest.keys[key] for key in request.features}
    pieces = manifest.plan.pieces_by_table
    bags_by_key = request.lengths.reshape(len(keys), -1)
    ends = np.cumsum(bags_by_key.sum(axis=1, dtype=np.int64))
    names, answers, bounds = [], [], []
    for feature, bags, end in (
        (feature, bags, end)
        for features, bags, end in zip(keys.values(), bags_by_key, ends, strict=True)
        for feature in features
    ):
        table = tables[feature.table]
        here = slice(end - int(bags.sum(dtype=np.int64)), end)
        ids: Ids = request.values[here].astype(np.int64, copy=False)
        weights = None if request.weights is None or not table.weighted else request.weights[here]
        answer, size, counted = _pool_bags(directory, manifest, pieces[table.name], table, ids, weights, bags)
        # Each of the bag's additions, and the arithmetic of a row, may round once.
        bound = size * ((bags[:, np.newaxis] + 8) * FP32_UNIT)
        bound[size + bound > np.finfo(np.float32).max] = np.inf
        if table.pooling is Pooling.MEAN:
            counts = np.maximum(counted, 1)[:, np.newaxis]
            answer, bound = answer / counts, bound / counts
        if manifest.output_dtype is OutputDtype.FP16:
            bound += np.abs(answer) * FP16_UNIT + FP16_SUBNORMAL
            bound[np.abs(answer) + bound > np.finfo(np.float16).max] = np.inf
        names.append(feature.name)
        answers.append(answer)
        bounds.append(bound)
    return Pooled(names, answers, bounds)


def read_rows(
    directory: Path, manifest: Manifest, shards: Sequence[Shard], table: Table, ids: Ids
) -> tuple[Doubles, Doubles]:
    """The numbers of rows `ids` of `table`, as its shards hold them.

    Args:
        shards: make the table up once.

    Returns:
        The numbers [n, dim], and the sizes that rounding acts on in computing them: |code × scale| + |bias|, which
        may cancel to a small number [n, dim].
    """
    numbers = np.zeros((len(ids), table.dim))
    sizes = np.zeros_like(numbers)
    for shard in shards:
        here = np.flatnonzero((ids >= shard.rows[0]) & (ids < shard.rows[1]))
        stored = _mapped(directory, manifest, shard, table.dtype)[ids[here] - shard.rows[0]]
        rows = dequantize(stored, table.dtype).astype(np.float64)
        bias = stored[:, 2:4].copy().view(np.float16).astype(np.float64) if table.dtype.quantized else 0.0
        columns = slice(*shard.columns)
        numbers[here, columns] = rows
        sizes[here, columns] = np.abs(rows - bias) + np.abs(bias)
    return numbers, sizes


def _pool_bags(
    directory: Path,
    manifest: Manifest,
    shards: Sequence[Shard],
    table: Table,
    ids: Ids,
    weights: npt.NDArray[Any] | None,
    bags: npt.NDArray[Any],
) -> tuple[Doubles, Doubles, npt.NDArray[np.int64]]:
    """Sums of bags [B, dim], the sizes that rounding acts on [B, dim], and how many ids count in each bag [B]."""
    bag_of = np.repeat(np.arange(bags.size), bags)
    outside = (ids < 0) | (ids >= table.rows)
    if isinstance(policy := table.id_policy, DefaultRow):
        ids = np.where(outside, policy.default_row, ids)
    elif policy is IdPolicy.ZERO:
        ids, bag_of = ids[~outside], bag_of[~outside]
        weights = None if weights is None else weights[~outside]
    answer = np.zeros((bags.size, table.dim))
    size = np.zeros_like(answer)
    step = max(1, _NUMBERS_AT_ONCE // table.dim)
    for start in range(0, ids.size, step):
        here = slice(start, start + step)
        rows, sizes = read_rows(directory, manifest, shards, table, ids[here])
        if weights is not None:
            rows *= weights[here, np.newaxis]
            sizes *= np.abs(weights[here, np.newaxis])
        # Ids lie bag by bag: sum each run of one bag.
        firsts = np.flatnonzero(np.diff(bag_of[here], prepend=-1))
        answer[bag_of[here][firsts]] += np.add.reduceat(rows, firsts)
        size[bag_of[here][firsts]] += np.add.reduceat(sizes, firsts)
    return answer, size, np.bincount(bag_of, minlength=bags.size)


def _mapped(directory: Path, manifest: Manifest, shard: Shard, dtype: WeightDtype) -> Bytes:
    return np.memmap(
        directory / manifest.plan.ranks[shard.rank].weights,
        np.uint8,
        mode="r",
        offset=shard.offset_bytes,
        shape=(shard.height, dtype.row_bytes(shard.width)),
    )
