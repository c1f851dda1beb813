"""Segments: one feature over one shard. What a rank is asked for, and answers with, is by segment."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from serving.bundle.hosts import IdDtype, part_text
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard
from serving.bundle.tables import Table

_MOST_INT32 = 2**31 - 1


class FeatureShard(NamedTuple):
    """A segment of a plan.

    Attributes:
        feature: position of the feature in the manifest.
        shard: the shard that it reads.
        name: what a host's bundle calls it. It does not change when the table grows.
        table: what a host's bundle calls the shard.
    """

    feature: int
    shard: Shard
    name: str
    table: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHost:
    """What a router's plan says of a host.

    Attributes:
        segments: names of all its segments, in order.
        columns: of all of them together.
        id_dtype: of row numbers, as they travel.
        is_weighted: whether it takes a weight for each row.
        part_of: what its bundle has to be a part of, as `Part.text`.
    """

    segments: tuple[str, ...]
    columns: int
    id_dtype: IdDtype
    is_weighted: bool
    part_of: str


def planned_host(manifest: Manifest, host: int) -> PlannedHost:
    """What the plan of a router's manifest says of a host."""
    segments = segments_by_rank(manifest)[manifest.plan.rank_of_host[host]]
    return PlannedHost(
        segments=tuple(each.name for each in segments),
        columns=sum(each.shard.width for each in segments),
        id_dtype=id_dtype_of(segments),
        is_weighted=takes_weights(manifest, segments),
        part_of=part_text(host, manifest.layout),
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


def name_twice(manifest: Manifest) -> str | None:
    """A name that two segments, or two shards, of a router's host would have, in words. None: there is none."""
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
    """Whether a host of a router's plan takes a weight for each row: one of its tables is weighted."""
    weighted = {table.name for table in manifest.tables if table.weighted}
    return any(each.shard.table in weighted for each in segments)


def id_dtype_of(segments: Iterable[FeatureShard]) -> IdDtype:
    """The dtype of the row numbers that a host is sent for some segments: INT32 where they fit."""
    return IdDtype.INT32 if all(each.shard.height <= _MOST_INT32 for each in segments) else IdDtype.INT64


def _name_of(table: Table, shard: Shard) -> str:
    """The name of a shard: as a slice, if it is not the whole table."""
    rows = "" if shard.height == table.rows else f"[{shard.rows[0]}:{shard.rows[1]}]"
    columns = "" if shard.width == table.dim else f"{'' if rows else '[:]'}[{shard.columns[0]}:{shard.columns[1]}]"
    return f"{table.name}{rows}{columns}"
