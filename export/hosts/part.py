"""What a host's bundle holds: its shards as tables, and its segments as features."""

import msgspec

from serving.bundle.hosts import FIRST_WEIGHTS, Part, host_model
from serving.bundle.manifest import HOSTS_FORMAT_VERSION, Manifest
from serving.bundle.plan import Plan, Rank, ShardingType
from serving.bundle.segments import id_dtype_of, segments_by_rank
from serving.bundle.tables import Feature, IdPolicy, OutputDtype, Pooling


def part_manifest(router: Manifest, rank: int, name: str, sums_dtype: OutputDtype) -> Manifest:
    """The manifest of a host's bundle, as far as it is known before its rows are stored.

    Ids are row numbers of the shards. The router has remapped and checked them, so that any other id is refused. All
    features are sums: the router divides means, by the count of the whole bag.

    Args:
        router: the router's manifest; its parity, files and hosts are not read.
        rank: the host's rank.
        name: the router's model.
        sums_dtype: dtype of the partial sums that the host answers with.
    """
    host = router.plan.ranks[rank].host
    segments = segments_by_rank(router)[rank]
    tables = {table.name: table for table in router.tables}
    names = {segment.shard: segment.table for segment in segments}
    return Manifest(
        format_version=HOSTS_FORMAT_VERSION,
        features=tuple(Feature(name=segment.name, table=segment.table) for segment in segments),
        tables=tuple(
            msgspec.structs.replace(
                tables[shard.table],
                name=table,
                rows=shard.height,
                dim=shard.width,
                pooling=Pooling.SUM,
                id_policy=IdPolicy.ERROR,
                id_map=None,
            )
            for shard, table in names.items()
        ),
        output_dtype=sums_dtype,
        plan=Plan(
            sharding=dict.fromkeys(names.values(), ShardingType.TABLE_WISE),
            ranks=(Rank(host=host, device=router.plan.ranks[rank].device, weights_file=FIRST_WEIGHTS),),
            shards=tuple(
                msgspec.structs.replace(shard, table=table, rank=0, rows=(0, shard.height), columns=(0, shard.width))
                for shard, table in names.items()
            ),
            row_alignment=router.plan.row_alignment,
        ),
        parity=(),
        exported_at=router.exported_at,
        versions=router.versions,
        files={},
        part_of=Part(model=name, host=host, plan=router.layout),
        id_dtype=id_dtype_of(segments),
    )


def table_of_part(router: Manifest, rank: int) -> dict[str, str]:
    """The router's table of each table of a host's bundle."""
    return {segment.table: segment.shard.table for segment in segments_by_rank(router)[rank]}


def part_models(router: Manifest, name: str) -> dict[int, str]:
    """The model of each rank that is on another host, by the rank's number."""
    return {number: host_model(name, host) for host, number in router.plan.rank_of_host.items()}
