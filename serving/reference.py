"""What a bundle should answer: its rows unpacked and pooled by numpy in float64. Shares no code with the program."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.formats import (
    FP16_SUBNORMAL,
    FP16_UNIT,
    FP32_UNIT,
    Bytes,
    CodeRows,
    WeightDtype,
    scales_and_biases_of,
)
from serving.bundle.load import weights_path
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard
from serving.bundle.tables import DefaultRow, Feature, IdPolicy, OutputDtype, Pooling, Table
from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES, SHARED
from serving.reference_ids import remapped, rows_of_known
from serving.requests.types import Ids, Outputs, Tensors

Doubles = npt.NDArray[np.float64]
# Numbers that are unpacked at a time, so that a large request takes no more memory than its answer.
_NUMBERS_AT_ONCE = 1 << 20
# Roundings of the arithmetic of a row, at most.
_ROUNDINGS_OF_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a request, and how far FP32 summation may be from it.

    Attributes:
        features: names, in the order of the answer.
        answers: of each feature, float64 [B, dim]; [1, dim] of one that comes once, [n, dim] of one that is not
            pooled.
        bounds: of each feature likewise, the largest error that rounding explains. It is infinite where a sum may
            leave the range of its dtype.
        outputs: the output that each feature is answered in.
    """

    features: Sequence[str]
    answers: Sequence[Doubles]
    bounds: Sequence[Doubles]
    outputs: Sequence[str]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each output, as it travels."""
        shapes: dict[str, list[int]] = {}
        for name, answer in zip(self.outputs, self.answers, strict=True):
            if name == SEQUENCES:
                shapes.setdefault(name, [1, 0])[1] += answer.size
            else:
                shapes.setdefault(name, [1, len(answer), 0])[2] += answer.shape[1]
        return shapes

    @property
    def is_unbounded(self) -> bool:
        """Whether a sum may leave the range of its dtype."""
        return any(bool(np.isinf(bound).any()) for bound in self.bounds)

    def by_feature(self, outputs: Outputs) -> dict[str, npt.NDArray[Any]]:
        """Cut outputs, `embeddings` [B, D], `once` [1, D] and `sequences` [M], into features.

        They are views, shaped as `answers`. Features of an output that is not there are left out.
        """
        by_name: dict[str, npt.NDArray[Any]] = {}
        ends = dict.fromkeys(self.outputs, 0)
        for name, expected, output in zip(self.features, self.answers, self.outputs, strict=True):
            if output not in outputs:
                continue
            start = ends[output]
            ends[output] = end = start + (expected.size if output == SEQUENCES else expected.shape[1])
            by_name[name] = outputs[output][..., start:end].reshape(expected.shape)
        return by_name

    def misses(self, answers: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, float]]:
        """The features that are further off than rounding explains.

        Args:
            answers: by feature; float32 or float16 [B, dim] or [n, dim]. Others are not looked at.

        Returns:
            The name of each such feature, and its largest error.
        """
        for name, expected, bound in zip(self.features, self.answers, self.bounds, strict=True):
            if name not in answers:
                continue
            error = np.abs(answers[name].astype(np.float64) - expected)
            if not ((error <= bound) | np.isinf(bound)).all():
                yield name, float(error.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class _Bags:
    """The bags of one feature.

    Attributes:
        ids: int64 [n].
        weights: [n], or None where the table takes none.
        lengths: [B], bag sizes; they add up to n.
    """

    ids: Ids
    weights: npt.NDArray[Any] | None
    lengths: npt.NDArray[Any]


def pool(directory: Path, manifest: Manifest, request: Tensors) -> Pooled:
    """Answer a request in float64 from the stored bytes.

    Args:
        directory: of the bundle.
        manifest: of the bundle.
        request: one that the bundle accepts.
    """
    tables = {table.name: table for table in manifest.tables}
    keys = _features_by_key(manifest, request)
    pieces = manifest.plan.pieces_by_table
    known_rows = {
        name: rows_of_known(directory, table.id_map, request) for name, table in tables.items() if table.id_map
    }
    lengths_by_key = _lengths_by_key(request, list(keys))
    ends = np.cumsum([lengths.sum(dtype=np.int64) for lengths in lengths_by_key])
    names, answers, bounds, outputs = [], [], [], []
    for (key, features), lengths, end in zip(keys.items(), lengths_by_key, ends, strict=True):
        window = slice(end - int(lengths.sum(dtype=np.int64)), end)
        ids: Ids = request.values[window].astype(np.int64, copy=False)
        for feature in features:
            table = tables[feature.table]
            rows = ids if table.id_map is None else remapped(table, table.id_map, known_rows[table.name], ids)
            is_sequence = table.is_sequence or request.tables is not None
            if is_sequence:
                bags = _Bags(rows, None, np.ones(len(rows), np.int64))
            else:
                bags = _Bags(rows, _weights_of(feature, table, request, window, lengths), lengths)
            answer, bound = _answer_feature(directory, manifest, pieces[table.name], table, bags)
            names.append(feature.name)
            answers.append(answer)
            bounds.append(bound)
            outputs.append(SEQUENCES if is_sequence else SHARED if key in request.shared else EMBEDDINGS)
    return Pooled(names, answers, bounds, outputs)


def _lengths_by_key(request: Tensors, keys: Sequence[str]) -> list[npt.NDArray[Any]]:
    """The lengths of each key: one of a key that comes once, as many as there are samples of any other."""
    shared = sum(key in request.shared for key in keys)
    samples = (request.lengths.size - shared) // max(len(keys) - shared, 1)
    ends = np.cumsum([1 if key in request.shared else samples for key in keys])
    return np.split(request.lengths, ends[:-1])


def _features_by_key(manifest: Manifest, request: Tensors) -> dict[str, tuple[Feature, ...]]:
    """The features of each key of a request; of a request for rows, each table, as a feature of its name."""
    if request.tables is not None:
        return {name: (Feature(name=name, table=name),) for name in request.tables}
    keys = manifest.keys
    return keys if request.features is None else {key: keys[key] for key in request.features}


def _weights_of(
    feature: Feature, table: Table, request: Tensors, window: slice, lengths: npt.NDArray[Any]
) -> npt.NDArray[Any] | None:
    """The weight of each id of a feature, whose ids are `here` in the request: [n]; None where each counts once."""
    if feature.position_weights:
        by_position = np.array(feature.position_weights, np.float32)
        weights: npt.NDArray[Any] = np.concatenate(
            [by_position[:0], *(by_position[:size] for size in lengths.tolist())]
        )
        return weights
    if feature.position_weights is not None or request.weights is None or not table.weighted:
        return None
    sent: npt.NDArray[Any] = request.weights[window]
    return sent


def read_rows(
    directory: Path, manifest: Manifest, shards: Sequence[Shard], table: Table, ids: Ids
) -> tuple[Doubles, Doubles]:
    """The numbers of some rows of a table, as its shards hold them.

    Args:
        directory: of the bundle.
        manifest: of the bundle.
        shards: they hold each number of the table once.
        table: the table.
        ids: int64 [n], each in [0, rows).

    Returns:
        The numbers, float64 [n, dim]; and the sizes that rounding acts on when they are computed,
        |code × scale| + |bias|, float64 [n, dim]. The two may cancel to a small number.
    """
    numbers = np.zeros((len(ids), table.dim))
    sizes = np.zeros_like(numbers)
    for shard in shards:
        positions = np.flatnonzero((ids >= shard.rows[0]) & (ids < shard.rows[1]))
        stored = _mapped(directory, manifest, shard, table.dtype)[ids[positions] - shard.rows[0]]
        rows = table.dtype.format.dequantize(stored).astype(np.float64)
        has_bias = isinstance(table.dtype.format, CodeRows)
        bias = scales_and_biases_of(stored)[:, 1:].astype(np.float64) if has_bias else 0.0
        columns = slice(*shard.columns)
        numbers[positions, columns] = rows
        sizes[positions, columns] = np.abs(rows - bias) + np.abs(bias)
    return numbers, sizes


def _answer_feature(
    directory: Path, manifest: Manifest, shards: Sequence[Shard], table: Table, bags: _Bags
) -> tuple[Doubles, Doubles]:
    """The answer for one feature, and its bound, each float64 [B, dim]."""
    bag_of, counted = _apply_policy(table, bags)
    answer, size = _sum_bags(directory, manifest, shards, table, counted, bag_of)
    # Each of the bag's additions may round once, and the arithmetic of a row a few times.
    bound = size * ((bags.lengths[:, np.newaxis] + _ROUNDINGS_OF_A_ROW) * FP32_UNIT)
    bound[size + bound > np.finfo(np.float32).max] = np.inf
    if table.pooling is Pooling.MEAN:
        counts = np.maximum(counted.lengths, 1)[:, np.newaxis]
        answer, bound = answer / counts, bound / counts
    if manifest.output_dtype is OutputDtype.FP16:
        bound += np.abs(answer) * FP16_UNIT + FP16_SUBNORMAL
        bound[np.abs(answer) + bound > np.finfo(np.float16).max] = np.inf
    return answer, bound


def _apply_policy(table: Table, bags: _Bags) -> tuple[npt.NDArray[np.int64], _Bags]:
    """The bag of each id that counts, int64 [n], and the bags with these n ids, each in [0, rows)."""
    bag_of = np.repeat(np.arange(bags.lengths.size), bags.lengths)
    ids, weights = bags.ids, bags.weights
    outside = (ids < 0) | (ids >= table.rows)
    if isinstance(policy := table.id_policy, DefaultRow):
        ids = np.where(outside, policy.default_row, ids)
    elif policy is IdPolicy.MODULO:
        ids = ids % table.rows
    elif policy is IdPolicy.ZERO:
        ids, bag_of = ids[~outside], bag_of[~outside]
        weights = None if weights is None else weights[~outside]
    return bag_of, _Bags(ids, weights, np.bincount(bag_of, minlength=bags.lengths.size))


def _sum_bags(
    directory: Path,
    manifest: Manifest,
    shards: Sequence[Shard],
    table: Table,
    bags: _Bags,
    bag_of: npt.NDArray[np.int64],
) -> tuple[Doubles, Doubles]:
    """The sum of each bag, and the sizes that rounding acts on, each float64 [B, dim]."""
    answer = np.zeros((bags.lengths.size, table.dim))
    size = np.zeros_like(answer)
    step = max(1, _NUMBERS_AT_ONCE // table.dim)
    for start in range(0, bags.ids.size, step):
        window = slice(start, start + step)
        rows, sizes = read_rows(directory, manifest, shards, table, bags.ids[window])
        if bags.weights is not None:
            rows *= bags.weights[window, np.newaxis]
            sizes *= np.abs(bags.weights[window, np.newaxis])
        # Ids of one bag are side by side. Each bag begins at one of `firsts`.
        firsts = np.flatnonzero(np.diff(bag_of[window], prepend=-1))
        answer[bag_of[window][firsts]] += np.add.reduceat(rows, firsts)
        size[bag_of[window][firsts]] += np.add.reduceat(sizes, firsts)
    return answer, size


def _mapped(directory: Path, manifest: Manifest, shard: Shard, dtype: WeightDtype) -> Bytes:
    """The stored rows of a shard, uint8 [rows, row bytes]."""
    return np.memmap(
        weights_path(directory, manifest, shard.rank),
        np.uint8,
        mode="r",
        offset=shard.offset_bytes,
        shape=(shard.row_count, dtype.row_bytes(shard.width)),
    )
