"""What bags of ids are answered with, in plain numpy. Shares no code with the server."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
# By the name of the output, without the leading 1.
Answer = Mapping[str, Doubles]


@dataclass(frozen=True)
class Feature:
    """A table's numbers [rows, dim], how bags are pooled, and what an id outside does: error, zero, modulo, or
    a row. Or the rows of raw ids: any other reads the last row.
    """

    table: str
    numbers: npt.NDArray[np.float32]
    mean: bool
    outside: str | int | Mapping[int, int]
    is_sequence: bool = False

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The ids that have rows: int64 [n]."""
        return np.array([*self.outside] if isinstance(self.outside, Mapping) else range(len(self.numbers)), np.int64)

    def rows(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64] | None:
        """The row of each id, int64 [n]; −1 for those that contribute nothing. None: an id is refused."""
        if isinstance(self.outside, Mapping):
            last = len(self.numbers) - 1
            return np.array([self.outside.get(id_, last) for id_ in ids.tolist()], np.int64)
        is_outside = (ids < 0) | (ids >= len(self.numbers))
        if self.outside == "error":
            return None if is_outside.any() else ids
        if self.outside == "modulo":
            return ids % len(self.numbers)
        return np.where(is_outside, -1 if self.outside == "zero" else self.outside, ids)


@dataclass(frozen=True)
class Bags:
    """What is looked up: by feature, its ids as they were sent and the rows of these, [n], and its bag sizes, [B], or [1]
    if it comes `once`.
    """

    features: Mapping[str, Feature]
    ids: Mapping[str, npt.NDArray[np.int64]]
    rows: Mapping[str, npt.NDArray[np.int64]]
    lengths: Mapping[str, npt.NDArray[np.int32]]
    samples: int
    shared: Collection[str] = ()

    @property
    def sequence_bytes(self) -> int:
        """Of the rows of sequences, as FP32."""
        return sum(
            self.rows[name].size * feature.numbers.shape[1] * 4
            for name, feature in self.features.items()
            if feature.is_sequence
        )

    def in_order(self, names: Sequence[str]) -> "Bags":
        """The same features in another order."""
        return replace(self, features={name: self.features[name] for name in names})


def bags_of(
    features: Mapping[str, Feature],
    values: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    shared: Collection[str] = (),
    otherwise: int = 1,
) -> Bags | None:
    """The bags of features, some of which come once; None where the ids or lengths are not right. Where all come once,
    there are `otherwise` samples.
    """
    shared = [name for name in features if name in shared]
    if len(shared) == len(features):
        samples, left_over = otherwise, lengths.size - len(shared)
    else:
        samples, left_over = divmod(lengths.size - len(shared), len(features) - len(shared))
    if left_over or samples < 0 or (lengths < 0).any() or int(lengths.sum(dtype=object)) != values.size:
        return None
    position, ids, rows = 0, {}, {}
    ends = np.cumsum([1 if name in shared else samples for name in features])
    by_feature = dict(zip(features, np.split(lengths, ends[:-1]), strict=True))
    for name, feature in features.items():
        count = int(by_feature[name].sum(dtype=np.int64))
        ids[name] = values[position : position + count]
        rows_of_key = feature.rows(ids[name])
        position += count
        if rows_of_key is None:
            return None
        rows[name] = rows_of_key
    return Bags(features, ids, rows, by_feature, samples, shared)


def answer_lookup(bags: Bags, outputs: Collection[str]) -> Answer:
    """The outputs of a lookup that are wanted: `embeddings` [B, D] of the features that are pooled, and `once` [1, D] of
    those that come once, and `sequences` [M] of the others.
    """
    sums = {name: _pooled(bags, name) for name, feature in bags.features.items() if not feature.is_sequence}
    pooled = [numbers for name, numbers in sums.items() if name not in bags.shared]
    single = [numbers for name, numbers in sums.items() if name in bags.shared]
    rows = [
        _numbers(feature, bags.rows[name]).ravel() for name, feature in bags.features.items() if feature.is_sequence
    ]
    answer = {}
    if pooled and "embeddings" in outputs:
        answer["embeddings"] = np.concatenate(pooled, axis=1)
    if single and "once" in outputs:
        answer["once"] = np.concatenate(single, axis=1)
    if rows and "sequences" in outputs:
        answer["sequences"] = np.concatenate(rows)
    return answer


def embeddings_of(bags: Bags) -> Doubles:
    """What scores are made of: all features that are pooled, [B, D]. What comes once is repeated."""
    width = {name: feature.numbers.shape[1] for name, feature in bags.features.items() if not feature.is_sequence}
    return np.concatenate(
        [np.broadcast_to(_pooled(bags, name), (bags.samples, width[name])) for name in width], axis=1
    )


def histories(bags: Bags, name: str) -> Iterator[tuple[npt.NDArray[np.int64], Doubles]]:
    """The ids of each sample, [n], and their rows, [n, dim]. What comes once is each sample's."""
    ends = np.cumsum(bags.lengths[name]).tolist()
    for sample in range(bags.samples):
        row = 0 if name in bags.shared else sample
        span = slice(ends[row] - int(bags.lengths[name][row]), ends[row])
        yield bags.ids[name][span], _numbers(bags.features[name], bags.rows[name][span])


def _pooled(bags: Bags, name: str) -> Doubles:
    feature, position = bags.features[name], 0
    sums = np.zeros((len(bags.lengths[name]), feature.numbers.shape[1]))
    for sample, count in enumerate(bags.lengths[name].tolist()):
        rows = bags.rows[name][position : position + count]
        position += count
        if (rows := rows[rows >= 0]).size:
            numbers = _numbers(feature, rows)
            sums[sample] = numbers.mean(axis=0) if feature.mean else numbers.sum(axis=0)
    return sums


def _numbers(feature: Feature, rows: npt.NDArray[np.int64]) -> Doubles:
    """Rows [n, dim]; zeros for −1."""
    numbers: Doubles = feature.numbers[rows].astype(np.float64)
    numbers[rows < 0] = 0
    return numbers
