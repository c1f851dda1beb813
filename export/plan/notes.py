"""What a person would not expect of a plan, a sentence each."""

from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from export.plan.sharding import ROUTER_BYTES, Sharding
from serving.bundle.manifest import Manifest
from serving.request.captured import PassedOver, read_captured

# A note is made where ranks hold more than this many times the tables' bytes. It names so many tables.
_COPIES_NOTED = 1.1
_TABLES_NAMED = 3


def plan_notes(manifest: Manifest, sharding: Sharding) -> Iterator[str]:
    """Bytes that are stored several times, limits that nobody set, hosts that would hold nothing, and traffic that is
    none.

    Args:
        manifest: tables and plan.
        sharding: what was asked of the planner, before its traffic was measured.
    """
    yield from _copies(manifest)
    if sharding.memory_assumed:
        yield (
            f"a rank was taken to hold {decimal(sharding.rank_bytes)}, 1/{sharding.machine_ranks} of this machine's "
            "memory: --memory-per-rank says what yours can"
        )
    if sharding.router_assumed:
        yield f"the router was taken to hold {decimal(ROUTER_BYTES)}: --router-memory says what yours can"
    if sharding.hosts_as_models and sharding.plan is None:
        hosts = len(manifest.plan.ranks) - 1
        if hosts < sharding.hosts:
            yield f"{sharding.hosts - hosts} of {sharding.hosts} hosts would hold nothing: the plan has {hosts}"
    if sharding.traffic is not None:
        passed_over, path = PassedOver(), Path(sharding.traffic)
        for _ in read_captured(path, passed_over, follow=True):
            pass
        yield from passed_over.said(path)


def _copies(manifest: Manifest) -> Iterator[str]:
    shards = manifest.plan.shards_by_table
    held = {table.name: sum(map(table.shard_bytes, shards[table.name])) for table in manifest.tables}
    more = {table.name: held[table.name] - table.rows * table.row_bytes for table in manifest.tables}
    total = sum(held.values())
    once = total - sum(more.values())
    if total > _COPIES_NOTED * once:
        named = ", ".join(
            f"{name!r} ({manifest.plan.sharding[name].value}) {decimal(more[name])}"
            for name in sorted(more, key=lambda name: -more[name])[:_TABLES_NAMED]
            if more[name] > 0
        )
        yield (
            f"ranks hold {decimal(total)} for {decimal(once)} of tables, {total / once:.1f} times as much; most "
            f"of it for {named}: a smaller --memory-per-rank, or --sharding, has fewer copies"
        )
