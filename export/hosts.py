"""The bundles of hosts: their contents, and the check that bundles of several machines belong together."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from export.errors import PublishError
from export.parity.verify import recorded_parity
from export.rows.table_error import TableError, Tally
from serving.bundle.load import Bundle, open_bundle, verify_digests
from serving.bundle.manifest import Agreement, Manifest
from serving.bundle.plan import FIRST_WEIGHTS, HostBundle, Part, Plan, Rank, ShardingType, host_model
from serving.bundle.segments import id_dtype_of, segments_by_rank
from serving.bundle.tables import Feature, IdPolicy, OutputDtype, Pooling
from serving.errors import BundleError


def part_manifest(router: Manifest, rank: int, name: str, sums_dtype: OutputDtype) -> Manifest:
    """The manifest of a host's bundle, before its rows are stored.

    Ids are row numbers of the shards. The router has remapped and checked them, so the host refuses any other id. All
    features are sums: the router divides means by the length of the whole bag.

    Args:
        router: the router's manifest. Its parity, files and hosts are not used.
        rank: the host's rank.
        name: the router's model.
        sums_dtype: the dtype of the host's answers, which are partial sums.
    """
    host = router.plan.ranks[rank].host
    segments = segments_by_rank(router)[rank]
    tables = {table.name: table for table in router.tables}
    names = {segment.shard: segment.table for segment in segments}
    return Manifest(
        features=tuple(Feature(name=segment.name, table=segment.table) for segment in segments),
        tables=tuple(
            msgspec.structs.replace(
                tables[shard.table],
                name=table,
                rows=shard.row_count,
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
                msgspec.structs.replace(
                    shard, table=table, rank=0, rows=(0, shard.row_count), columns=(0, shard.width)
                )
                for shard, table in names.items()
            ),
            row_alignment=router.plan.row_alignment,
        ),
        parity=(),
        exported_at=router.exported_at,
        checkpoint=router.checkpoint,
        versions=router.versions,
        files={},
        part_of=Part(model=name, host=host, plan=router.placement_digest),
        id_dtype=id_dtype_of(segments),
    )


def tables_of_host(router: Manifest, host: int) -> dict[str, str]:
    """The router's table of each table of a host's bundle."""
    segments = segments_by_rank(router)[router.plan.rank_of_host[host]]
    return {segment.table: segment.shard.table for segment in segments}


def host_bundles(router: Manifest, name: str, version: int, parts: Mapping[int, Bundle]) -> tuple[HostBundle, ...]:
    """The entries of a router's manifest for the bundles of its hosts.

    Args:
        router: the manifest.
        name: the router's model.
        version: the number of all bundles.
        parts: the bundles, by rank.
    """
    models = part_models(router, name)
    return tuple(
        HostBundle(host=router.plan.ranks[rank].host, model=models[rank], version=version, manifest=part.digest)
        for rank, part in parts.items()
    )


def part_models(router: Manifest, name: str) -> dict[int, str]:
    """The model of each rank on another host, by the rank's number."""
    return {number: host_model(name, host) for host, number in router.plan.rank_of_host.items()}


def open_parts(repository: Path, router: Manifest, name: str, version: int) -> dict[int, Bundle]:
    """Open the bundles of all hosts, and compare every file with its digest.

    Args:
        repository: Triton's model repository.
        router: the router's manifest.
        name: the router's model.
        version: the number of all bundles.

    Returns:
        The bundles, by rank.

    Raises:
        PublishError: a line for each bundle that is missing, damaged, part of another plan, or exported from another
            checkpoint.
    """
    bundles: dict[int, Bundle] = {}
    problems: list[str] = []
    for rank, model in part_models(router, name).items():
        path = repository / model / str(version)
        host = router.plan.ranks[rank].host
        try:
            bundles[rank] = bundle = open_bundle(path)
            verify_digests(bundle)
            recorded_parity(bundle)
        except BundleError as error:
            problems.append(f"host {host}: {error}")
            continue
        part = bundle.manifest.part_of
        if part is None or (part.model, part.host, part.plan) != (name, host, router.placement_digest):
            problems.append(
                f"host {host}: {path}: expected a part of this plan of {name!r}, got one of another: "
                "export it again with the same options, --memory-per-rank among them"
            )
        elif bundle.manifest.checkpoint != router.checkpoint:
            problems.append(
                f"host {host}: {path}: expected one that was exported from the checkpoint given here, "
                f"{_short(router.checkpoint)}, got one from {_short(bundle.manifest.checkpoint)}: give every machine "
                "the same files; of safetensors, with their time of modification (cp -p)"
            )
    if problems:
        raise PublishError("\n".join(["the set is not complete:", *problems]))
    return bundles


def _short(fingerprint: str | None) -> str:
    """A fingerprint of a checkpoint in a line."""
    return "the module itself" if fingerprint is None else f"checkpoint {fingerprint[:12]}"


def recorded_errors(
    router: Manifest, parts: Mapping[int, Bundle], router_errors: Mapping[str, TableError]
) -> dict[str, TableError]:
    """How far the rows of each table moved, from the parity that the hosts' bundles record.

    Args:
        router: the router's manifest.
        parts: the bundles, by rank.
        router_errors: how far the rows on the router's own rank moved.

    Returns:
        The errors by the router's tables. A cosine is the mean over the parts, weighted by their elements.
    """
    errors = dict(router_errors)
    for rank, bundle in parts.items():
        parity = recorded_parity(bundle)
        tables = tables_of_host(router, router.plan.ranks[rank].host)
        for table in bundle.manifest.tables:
            error = TableError(table.dtype)
            error.tally = _tally(parity[table.name].quantized, table.rows * table.dim)
            error.bound = parity[table.name].limit
            if (total := errors.setdefault(tables[table.name], error)) is not error:
                total.join(error)
    return errors


def _tally(agreement: Agreement, elements: int) -> Tally:
    """Sums from which `Tally.agreement` computes `agreement` again."""
    return Tally(
        largest=agreement.largest,
        worst_row=agreement.worst_row,
        elements=elements,
        absolute=agreement.mean * elements,
        squared=2 * (1 - agreement.cosine) * elements,
        squared_a=elements,
        squared_b=elements,
    )
