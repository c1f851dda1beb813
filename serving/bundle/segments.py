"""Segments: a segment is one feature over one shard. Requests to ranks, and their answers, are by segment."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from serving.bundle.manifest import Manifest
from serving.bundle.plan import IdDtype, Shard, part_text
from serving.bundle.tables import Table

_MOST_INT32 = 2**31 - 1


class FeatureShard(NamedTuple):
    """A segment of a plan.

    Attributes:
        feature: the position of the feature in the manifest.
        shard: the shard that it reads.
        name: the feature's name in a host's bundle. It does not change when the table grows.
        table: the table's name in a host's bundle.
    """

    feature: int
    shard: Shard
    name: str
    table: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHost:
    """A host in a router's plan.

    Attributes:
        segments: the names of all its segments, in order.
        columns: the sum of their widths.
        id_dtype: the dtype of the row numbers in requests to the host.
        is_weighted: whether requests to the host have a per-id weight for each row.
        part_of: the plan that its bundle must be a part of, as `Part.text`.
    """

    segments: tuple[str, ...]
    columns: int
    id_dtype: IdDtype
    is_weighted: bool
    part_of: str


def planned_host(manifest: Manifest, host: int) -> PlannedHost:
    """A host in the plan of a router's manifest."""
    segments = segments_by_rank(manifest)[manifest.plan.rank_of_host[host]]
    return PlannedHost(
        segments=tuple(segment.name for segment in segments),
        columns=sum(segment.shard.width for segment in segments),
        id_dtype=id_dtype_of(segments),
        is_weighted=takes_weights(manifest, segments),
        part_of=part_text(host, manifest.placement_digest),
    )


def segments_by_rank(manifest: Manifest) -> list[list[FeatureShard]]:
    """The segments of each rank, in the order of its partial sums: by feature, then by the feature's shards."""
    by_rank: list[list[FeatureShard]] = [[] for _ in manifest.plan.ranks]
    pieces = manifest.plan.pieces_by_table
    for position, (feature, table) in enumerate(zip(manifest.features, manifest.feature_tables, strict=True)):
        for number, shard in enumerate(pieces[table.name]):
            is_whole = len(pieces[table.name]) == 1
            name = feature.name if is_whole else f"{feature.name}#{number}"
            by_rank[shard.rank].append(FeatureShard(position, shard, name, _name_of(table, shard)))
    return by_rank


def repeated_name(manifest: Manifest) -> str | None:
    """A line about two segments or shards of a host that would get the same name, or None if all names differ."""
    for host, rank in manifest.plan.rank_of_host.items():
        features: dict[str, str] = {}
        tables: dict[str, Shard] = {}
        for segment in segments_by_rank(manifest)[rank]:
            feature = manifest.features[segment.feature].name
            if (other := features.setdefault(segment.name, feature)) != feature:
                return f"host {host}: features {other!r} and {feature!r} would both have a segment {segment.name!r}"
            first = tables.setdefault(segment.table, segment.shard)
            if first != segment.shard:
                both = f"tables {first.table!r} and {segment.shard.table!r}"
                return f"host {host}: {both} would both have a shard {segment.table!r}"
    return None


def takes_weights(manifest: Manifest, segments: Iterable[FeatureShard]) -> bool:
    """Whether requests for these segments have per-id weights: one of their tables is weighted."""
    weighted = {table.name for table in manifest.tables if table.weighted}
    return any(segment.shard.table in weighted for segment in segments)


def id_dtype_of(segments: Iterable[FeatureShard]) -> IdDtype:
    """The dtype of row numbers in requests for these segments: INT32 if all of them fit, else INT64."""
    return IdDtype.INT32 if all(segment.shard.row_count <= _MOST_INT32 for segment in segments) else IdDtype.INT64


def _name_of(table: Table, shard: Shard) -> str:
    """The name of a shard: its table's name, with a slice if it is not the whole table."""
    rows = "" if shard.row_count == table.rows else f"[{shard.rows[0]}:{shard.rows[1]}]"
    columns = "" if shard.width == table.dim else f"{'' if rows else '[:]'}[{shard.columns[0]}:{shard.columns[1]}]"
    return f"{table.name}{rows}{columns}"
