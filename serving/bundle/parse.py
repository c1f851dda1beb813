"""Read a manifest strictly: anybody may have written it. One that contradicts itself is refused."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from serving.bundle.manifest import DEVICE, FORMAT_VERSION, HOSTS_FORMAT_VERSION, MODEL, PROGRAM, Manifest
from serving.bundle.plan import tiling_error
from serving.errors import BundleError
from serving.files.strict import UNREADABLE

# In version 3 each feature is its own key. It lacks left_out, notes, and the parity with the trained module.
_READABLE_VERSIONS = (3, FORMAT_VERSION, HOSTS_FORMAT_VERSION)


class _Header(msgspec.Struct):
    format_version: int


def parse_manifest(path: Path, text: bytes) -> Manifest:
    """The manifest in `text`, checked for contradictions.

    Args:
        path: the file that holds `text`, for errors.
        text: JSON.

    Raises:
        BundleError: naming the key that is missing, unknown, inconsistent or too new.
    """
    try:
        # The version first: a newer manifest may have keys that this code does not know.
        found = msgspec.json.decode(text, type=_Header).format_version
        if found not in _READABLE_VERSIONS:
            raise BundleError(
                f"{path}: format_version: expected one of {_READABLE_VERSIONS}, got {found}: "
                "serve it with the tbe-serving that exported it, or export it again"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except UNREADABLE as error:
        raise BundleError(f"{path}: {error}") from error
    _check_consistency(path, manifest)
    return manifest


def _check_consistency(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself. Code that reads it later can then index by every name in it."""
    # Each looks only at what those before it found right.
    for contradictions in (_in_tables, _in_features, _in_plan, _in_hosts, _in_files, _in_shards):
        for contradiction in contradictions(manifest):
            raise BundleError(f"{path}: {contradiction}")


def _in_tables(manifest: Manifest) -> Iterator[str]:
    if len({table.name for table in manifest.tables}) < len(manifest.tables):
        yield "tables: a name appears twice"
    for table in manifest.tables:
        if table.rows <= 0 or table.dim <= 0:
            yield f"table {table.name!r}: expected rows and dim > 0"
        if table.policy_error is not None:
            yield f"table {table.name!r}: {table.policy_error}"


def _in_features(manifest: Manifest) -> Iterator[str]:
    if not manifest.features:
        yield "features: expected at least one"
    if len({feature.name for feature in manifest.features}) < len(manifest.features):
        yield "features: a name appears twice"
    side_by_side = [feature for features in manifest.keys.values() for feature in features]
    if side_by_side != list(manifest.features):
        yield "features: those of one key are not side by side"
    tables = {table.name for table in manifest.tables}
    for feature in manifest.features:
        if feature.table not in tables:
            yield f"feature {feature.name!r}: no table {feature.table!r}"


def _in_plan(manifest: Manifest) -> Iterator[str]:
    plan, tables = manifest.plan, {table.name for table in manifest.tables}
    for number, rank in enumerate(plan.ranks):
        if rank.device != DEVICE:
            made_for = f"was made for device {rank.device!r}, this is for {DEVICE!r}"
            yield f"rank {number}: {made_for}: export it again for that"
    if plan.row_alignment != 1:
        yield f"row_alignment: expected 1 on cpu, got {plan.row_alignment}"
    if plan.sharding.keys() != tables:
        yield "plan: sharding does not name each table once"


def _in_hosts(manifest: Manifest) -> Iterator[str]:
    elsewhere = [rank.host for rank in manifest.plan.ranks if rank.weights_file is None]
    if [each.host for each in manifest.hosts] != sorted(set(elsewhere)) or len(set(elsewhere)) < len(elsewhere):
        yield f"hosts: expected one entry for each rank without a file of weights, hosts {elsewhere}"
    is_of_hosts = bool(manifest.hosts) or manifest.part_of is not None
    if is_of_hosts != (manifest.format_version == HOSTS_FORMAT_VERSION):
        yield f"format_version: expected {HOSTS_FORMAT_VERSION} with `hosts` or `part_of`, and only there"
    if manifest.hosts and (manifest.part_of is not None or manifest.plan.ranks[0].weights_file is None):
        yield "hosts: expected a router's bundle, whose first rank is its own"


def _in_files(manifest: Manifest) -> Iterator[str]:
    used = {MODEL, PROGRAM, *manifest.weights_files}
    if used != manifest.files.keys():
        yield f"files: expected {sorted(used)}, got {sorted(manifest.files)}"
    for name in used:
        if name != Path(name).name or name in (".", "..") or "\0" in name:
            yield f"files: {name!r} leaves the bundle"


def _in_shards(manifest: Manifest) -> Iterator[str]:
    plan, tables = manifest.plan, {table.name: table for table in manifest.tables}
    for shard in plan.shards:
        if shard.table not in tables:
            yield f"plan: a shard of no table, {shard.table!r}"
    for name, shards in plan.shards_by_table.items():
        table = tables[name]
        wrong = tiling_error(plan.sharding[name], table.rows, table.dim, shards, len(plan.ranks))
        if wrong is not None:
            yield f"table {name!r}: {wrong}"
        for shard in shards:
            file = plan.ranks[shard.rank].weights_file
            if file is None:
                continue
            size = manifest.files[file].size_bytes
            end = shard.offset_bytes + table.shard_bytes(shard)
            if shard.offset_bytes < 0 or end > size:
                yield f"table {name!r}: bytes [{shard.offset_bytes}, {end}) are outside a file of {size} bytes"
