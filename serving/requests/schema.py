"""The schema of a bundle, which requests are checked against, and the features that a request selects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput, DensePart, JaggedKind
from serving.bundle.tables import DefaultRow, IdPolicy
from serving.errors import InvalidRequest, Reason, quoted
from serving.requests.id_maps import IdMaps
from serving.requests.offsets import index_of_ranges

# Maximum cached selections: most requests that name features name the same ones.
_KEPT_SELECTIONS = 1024
# The fields of a `FeatureSet` that are of the model, or of all of its features.
_SAME_IN_SUBSETS = frozenset({"id_maps", "position_weights", "what", "default"})
# What comes before tables and positions there, so that no names of features are equal.
_TABLES, _POSITIONS = -2, -1
_NO_ROW = -1
_ANY_LENGTH = 2**63 - 1


@dataclass(frozen=True, eq=False, slots=True)
class FeatureSet:
    """Some features, in the order of an answer.

    Attributes:
        names: the names of the features [F].
        key_of: the KJT key that each feature reads [F].
        tables: the names of their tables [F].
        positions: the positions of the features in the schema; int64 [F].
        rows: the rows of their tables; uint64 [F].
        dims: the columns of each feature in an answer; int64 [F].
        weighted: whether a request has weights for their ids; bool [F].
        zero: whether the id policy is `zero`: an id outside the table contributes nothing; bool [F].
        default_rows: the row that is read for an id outside the table, or -1; int64 [F].
        modulo: whether the id policy is `modulo`: an id outside the table reads the row id mod rows; bool [F].
        id_maps: the maps of all tables of the model whose ids are remapped, or None.
        maps: the number of the table's map, or -1 if its ids are not remapped; int64 [F].
        position_weights: the position weights of all features of the model; float32 [n], or None.
        first_weights: the index of the feature's first position weight, or -1 without position weights; int64 [F].
        longest_bags: the maximum ids of a bag; int64 [F].
        sequence: whether the answer has a row for each id instead of a pooled row; bool [F].
        default: whether these are all features, in the schema's order.
        what: for messages, "feature", or "table" in a request for rows of tables.
        keys: the distinct `key_of`, in order, for which a request has ids.
        reads: for each feature, the position of its key in `keys`; int64 [F]. None: each feature has a different key.
        index: the numbers 0 to F; int64 [F + 1].
        ends: the column after the last one of each feature in an answer; the last is D; int64 [F].
        pooled_columns: an index of the columns of the pooled features in an answer.
    """

    names: tuple[str, ...]
    key_of: tuple[str, ...]
    tables: tuple[str, ...]
    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint64]
    dims: npt.NDArray[np.int64]
    weighted: npt.NDArray[np.bool_]
    zero: npt.NDArray[np.bool_]
    default_rows: npt.NDArray[np.int64]
    modulo: npt.NDArray[np.bool_]
    id_maps: IdMaps | None
    maps: npt.NDArray[np.int64]
    position_weights: npt.NDArray[np.float32] | None
    first_weights: npt.NDArray[np.int64]
    longest_bags: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.bool_]
    default: bool
    what: str = "feature"
    keys: tuple[str, ...] = field(init=False)
    reads: npt.NDArray[np.int64] | None = field(init=False)
    index: npt.NDArray[np.int64] = field(init=False)
    ends: npt.NDArray[np.int64] = field(init=False)
    pooled_columns: slice | npt.NDArray[np.int64] = field(init=False)
    _pooled: "FeatureSet | None" = field(init=False)

    def __post_init__(self) -> None:
        positions = {key: position for position, key in enumerate(dict.fromkeys(self.key_of))}
        is_shared = len(positions) < len(self.key_of)
        object.__setattr__(self, "keys", tuple(positions))
        object.__setattr__(self, "reads", np.array([positions[key] for key in self.key_of]) if is_shared else None)
        object.__setattr__(self, "index", np.arange(len(self.names) + 1))
        object.__setattr__(self, "ends", np.cumsum(self.dims))
        pooled = self.subset(np.flatnonzero(~self.sequence)) if self.sequence.any() else None
        object.__setattr__(self, "_pooled", pooled)
        is_pooled = ~self.sequence
        starts, dims = (self.ends - self.dims)[is_pooled], self.dims[is_pooled]
        object.__setattr__(self, "pooled_columns", index_of_ranges(starts, dims) if dims.size else slice(0))

    @property
    def pooled(self) -> "FeatureSet":
        """The features that are pooled: this object if all are."""
        # Without a reference to itself, which only a full garbage collection would free.
        return self if self._pooled is None else self._pooled

    def subset(self, indices: npt.NDArray[np.int64]) -> "FeatureSet":
        """The features at `indices` of this set, int64 [n]; in that order."""
        chosen: dict[str, Any] = {}
        for column in fields(self):
            if not column.init or column.name in _SAME_IN_SUBSETS:
                continue
            value = getattr(self, column.name)
            chosen[column.name] = (
                tuple(value[index] for index in indices) if isinstance(value, tuple) else value[indices]
            )
        default = self.default and np.array_equal(indices, self.index[:-1])
        return replace(self, **chosen, default=default)

    def positions_of(self, other: "FeatureSet") -> npt.NDArray[np.int64]:
        """The positions of the features of `other` in this set, which must have all of them: int64 [features]."""
        if other is self or not other.names:
            return other.index[:-1]
        position_of = np.empty(int(self.positions.max()) + 1, np.int64)
        position_of[self.positions] = self.index[:-1]
        return position_of[other.positions]


@dataclass(frozen=True, slots=True)
class LookupSchema:
    """The features of a bundle.

    Attributes:
        all_features: all features, in the manifest's order.
        weighted: whether a request carries a weight for each id.
        scores: the names of the outputs that are scores; empty except in a `ScoringSchema`.
        dense_inputs: the dense inputs; empty except in a `ScoringSchema`.
        by_id: the dense inputs with a row for each id of a key, and the key of each.
    """

    all_features: FeatureSet
    weighted: bool
    scores: frozenset[str] = field(init=False, default=frozenset())
    dense_inputs: tuple[DenseInput, ...] = field(init=False, default=())
    by_id: Mapping[str, str] = field(init=False, default_factory=dict)
    _positions: dict[str, list[int]] = field(init=False, default_factory=dict)
    _selections: dict[tuple[str | int, ...] | None, FeatureSet] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for position, key in enumerate(self.all_features.key_of):
            self._positions.setdefault(key, []).append(position)
        self._selections[None] = self.all_features

    def first_of(self, key: str) -> int:
        """The position of the first feature that reads `key`."""
        return self._positions[key][0]

    def select(self, keys: Sequence[str] | None) -> FeatureSet:
        """The features that read `keys`, in that order; all features if it is None.

        The results are cached, so the same keys mostly give the same object.

        Raises:
            InvalidRequest: a key is unknown or repeated, or `keys` is empty.
        """
        cache_key = None if keys is None else tuple(keys)
        feature_set = self._selections.get(cache_key)
        if feature_set is None:
            names = cache_key or ()
            _expect_names("feature", names, self.all_features.keys)
            positions = [position for name in names for position in self._positions[name]]
            feature_set = self.all_features.subset(np.array(positions, np.int64))
            self._keep(cache_key, feature_set)
        return feature_set

    def select_rows(self, tables: Sequence[str]) -> FeatureSet:
        """The selection for rows of some tables, in that order: a sequence for each table, with the table's name.

        A feature that reads the table looks its rows up. Per-id weights and position weights have no effect.

        Raises:
            InvalidRequest: a table is unknown or repeated, or `tables` is empty.
        """
        cache_key: tuple[str | int, ...] = (_TABLES, *tables)
        feature_set = self._selections.get(cache_key)
        if feature_set is None:
            _expect_names("table", tuple(tables), self.all_features.tables)
            first = self.all_features.subset(
                np.array([self.all_features.tables.index(name) for name in tables], np.int64)
            )
            count = len(first.names)
            feature_set = replace(
                first,
                names=tuple(tables),
                key_of=tuple(tables),
                weighted=np.zeros(count, np.bool_),
                first_weights=np.full(count, -1),
                longest_bags=np.full(count, _ANY_LENGTH),
                sequence=np.ones(count, np.bool_),
                default=False,
                what="table",
            )
            self._keep(cache_key, feature_set)
        return feature_set

    def subset(self, positions: Sequence[int]) -> FeatureSet:
        """The features at some positions of the schema, in that order. The results are cached."""
        cache_key = (_POSITIONS, *positions)
        feature_set = self._selections.get(cache_key)
        if feature_set is None:
            feature_set = self.all_features.subset(np.array(positions, np.int64))
            self._keep(cache_key, feature_set)
        return feature_set

    def _keep(self, cache_key: tuple[str | int, ...] | None, feature_set: FeatureSet) -> None:
        if len(self._selections) >= _KEPT_SELECTIONS:
            self._selections.clear()
            self._selections[None] = self.all_features
        self._selections[cache_key] = feature_set


@dataclass(frozen=True, slots=True)
class ScoringSchema(LookupSchema):
    """The features of a bundle with a dense part, and the inputs of its scores.

    Attributes:
        dense_part: the dense part, which computes the scores.
        jagged: for each jagged input of the dense part, the position of its feature, or of the first feature that
            reads its key.
        scored_rows: whether scores need a feature's rows; bool [F].
        scores_all_rows: whether scores need the rows of all features that are not pooled.
    """

    dense_part: DensePart
    jagged: tuple[int, ...] = field(init=False)
    scored_rows: npt.NDArray[np.bool_] = field(init=False)
    scores_all_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        LookupSchema.__post_init__(self)  # `super()` does not work in dataclasses with slots
        part = self.dense_part
        positions = [
            self.all_features.names.index(jagged.name)
            if jagged.kind is JaggedKind.ROWS
            else self.first_of(part.by_id[jagged.name] if jagged.kind is JaggedKind.NUMBERS else jagged.name)
            for jagged in part.jagged
        ]
        rows = [
            position
            for jagged, position in zip(part.jagged, positions, strict=True)
            if jagged.kind is JaggedKind.ROWS
        ]
        scored_rows = np.isin(self.all_features.positions, rows)
        object.__setattr__(self, "scores", frozenset(output.name for output in part.outputs))
        object.__setattr__(self, "dense_inputs", part.inputs)
        object.__setattr__(self, "by_id", part.by_id)
        object.__setattr__(self, "jagged", tuple(positions))
        object.__setattr__(self, "scored_rows", scored_rows)
        object.__setattr__(self, "scores_all_rows", np.array_equal(scored_rows, self.all_features.sequence))


def schema_of(manifest: Manifest, id_maps: IdMaps | None) -> LookupSchema:
    """The schema of a bundle, with the maps of its tables: a `ScoringSchema` if the bundle has a dense part."""
    every = _all_features(manifest, id_maps)
    if manifest.dense_part is None:
        return LookupSchema(every, manifest.weighted)
    return ScoringSchema(every, manifest.weighted, manifest.dense_part)


def scoring_schema(manifest: Manifest, part: DensePart) -> ScoringSchema:
    """The schema of a bundle with the dense part `part`, for calls of that part. Ids are not mapped to rows."""
    return ScoringSchema(_all_features(manifest, None), manifest.weighted, part)


def _all_features(manifest: Manifest, id_maps: IdMaps | None) -> FeatureSet:
    tables = manifest.feature_tables
    policies = [table.id_policy for table in tables]
    return FeatureSet(
        names=tuple(feature.name for feature in manifest.features),
        key_of=tuple(feature.key for feature in manifest.features),
        tables=tuple(table.name for table in tables),
        positions=np.arange(len(tables)),
        rows=np.array([table.rows for table in tables], np.uint64),
        dims=np.array([table.dim for table in tables], np.int64),
        weighted=np.array(list(manifest.sends_weights.values())),
        zero=np.array([policy is IdPolicy.ZERO for policy in policies]),
        default_rows=np.array([p.default_row if isinstance(p, DefaultRow) else _NO_ROW for p in policies]),
        modulo=np.array([policy is IdPolicy.MODULO for policy in policies]),
        id_maps=id_maps,
        maps=np.full(len(tables), -1) if id_maps is None else id_maps.numbers_of([table.name for table in tables]),
        **_by_position([feature.position_weights for feature in manifest.features]),
        sequence=np.array([table.is_sequence for table in tables]),
        default=True,
    )


def _expect_names(what: str, names: tuple[str, ...], valid_names: tuple[str, ...]) -> None:
    """Refuse names that are unknown or repeated, and an empty list."""
    valid = {*valid_names}
    for name in names:
        if name not in valid:
            one_of = quoted(dict.fromkeys(valid_names))
            raise InvalidRequest(f"{what} {shortened(name)!r}: expected one of {one_of}", Reason.FEATURES)
    if not names:
        one_of = quoted(dict.fromkeys(valid_names))
        raise InvalidRequest(f"{what}s: expected at least one of {one_of}, got none", Reason.FEATURES)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{what} {twice!r}: expected each {what} once, got it twice", Reason.FEATURES)


def _by_position(weights: Sequence[tuple[float, ...] | None]) -> dict[str, Any]:
    """The attributes of a selection of all features about position weights."""
    counts = np.array([len(feature_weights or ()) for feature_weights in weights], np.int64)
    any_weights = any(feature_weights is not None for feature_weights in weights)
    return {
        "position_weights": np.array(
            [weight for feature_weights in weights for weight in feature_weights or ()], np.float32
        )
        if any_weights
        else None,
        "first_weights": np.where(counts > 0, np.cumsum(counts) - counts, -1),
        "longest_bags": np.where(counts > 0, counts, _ANY_LENGTH),
    }


def shortened(name: str) -> str:
    """At most 64 characters of a name that a caller sent.

    gRPC sends error messages as metadata, and drops a stream with more than 16 KiB of metadata.
    """
    return name if len(name) <= 64 else name[:64] + "…"
