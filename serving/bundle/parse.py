"""Read a manifest strictly, because it is not trusted, and refuse contradictions."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    PROGRAM,
    ROW_ALIGNMENTS,
    SHARD_ALIGNMENT,
    Capability,
    Manifest,
)
from serving.bundle.parse_dense_part import dense_part_errors
from serving.bundle.plan import COLUMN_MULTIPLE, Shard, host_model, tiling_error
from serving.bundle.scores import SCORES_FILES
from serving.bundle.tables import IdPolicy, is_name
from serving.errors import BundleError
from serving.files import UNREADABLE, json_tree

# Formats that only pre-releases wrote.
_PRE_RELEASES = range(1, FORMAT_VERSION)
# The names of a bundle's other files.
_RESERVED = (MANIFEST, Path(MANIFEST).with_suffix(".sig").name, MODEL, PROGRAM, ID_MAPS_FILE)
_LARGEST_FP32 = (2 - 2**-23) * 2.0**127
_EXPECTED_NAME = "expected a name without commas and control characters"


class _Format(msgspec.Struct):
    format_version: int


class _Requirements(msgspec.Struct):
    requires: list[str]


def parse_manifest(path: Path, text: bytes) -> Manifest:
    """The manifest in `text`, checked for contradictions.

    Args:
        path: the file that holds `text`, for errors.
        text: JSON.

    Raises:
        BundleError: naming the key that is missing, unknown, inconsistent or too new.
    """
    try:
        document = msgspec.json.decode(text, type=dict[str, Any])
        requires = _pop_header(path, document)
        manifest = msgspec.convert(document, Manifest)
        keys = json_tree(text)
    except msgspec.ValidationError as error:
        raise BundleError(f"{path}: {error}") from error
    except UNREADABLE as error:
        raise BundleError(f"{path}: expected JSON, got {len(text)} bytes: {error}: copy the bundle again") from error
    except ValueError as error:
        raise BundleError(f"{path}: {error}") from error
    for wrong in _nulls(keys):
        raise BundleError(f"{path}: {wrong}")
    _check_consistency(path, manifest)
    if requires != (needed := [capability.value for capability in manifest.requires]):
        raise BundleError(f"{path}: requires: expected {needed}, which is what the bundle has, got {requires}")
    return manifest


def _pop_header(path: Path, document: dict[str, Any]) -> list[str]:
    """Take `format_version` and `requires` out of a manifest, before its other keys are checked.

    Later formats and unknown capabilities may have other keys that this release does not know.

    Returns:
        `requires`.

    Raises:
        BundleError: the format differs, or the bundle requires an unknown capability.
        ValueError: one of them is missing or has a wrong type.
    """
    version = msgspec.convert(document, _Format).format_version
    if version != FORMAT_VERSION:
        advice = "serve it with the tbe-serving that exported it, or export it again"
        if version in _PRE_RELEASES:
            advice = "exported by a pre-release: export it again"
        raise BundleError(f"{path}: format_version: expected {FORMAT_VERSION}, got {version}: {advice}")
    requires = msgspec.convert(document, _Requirements).requires
    for name in requires:
        if name not in [capability.value for capability in Capability]:
            raise BundleError(
                f"{path}: requires: this tbe-serving does not know {name!r}: serve the bundle with the tbe-serving "
                "that exported it, or export it again"
            )
    del document["format_version"], document["requires"]
    return requires


def _nulls(document: Any) -> Iterator[str]:
    """Find nulls in place of missing keys, which msgspec does not distinguish."""
    for feature in document["features"]:
        if "shared_key" in feature and feature["shared_key"] is None:
            yield f"feature {feature['name']!r}: shared_key: expected a name, or no such key, got null"
        if "position_weights" in feature and feature["position_weights"] is None:
            yield f"feature {feature['name']!r}: position_weights: expected numbers, or no such key, got null"
    for table in document["tables"]:
        if "id_map" in table and (table["id_map"] is None or table["id_map"].get("hashed", table) is None):
            yield f"table {table['name']!r}: id_map: expected a map, or no such key, got null"
        elif _hashed(table).get("input_hash_size", table) is None:
            yield f"table {table['name']!r}: input_hash_size: expected a number, or no such key, got null"


def _hashed(table: Any) -> Any:
    """How the map of a table hashes unknown ids; empty if it does not."""
    return (table.get("id_map") or {}).get("hashed") or {}


def _check_consistency(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself, so that later code can index by every name in it."""
    # The order matters: a check relies on the checks before it.
    for contradictions in (
        _table_errors,
        _feature_errors,
        dense_part_errors,
        _plan_errors,
        _host_errors,
        _file_errors,
        _shard_errors,
        _offset_errors,
        _id_map_errors,
    ):
        for contradiction in contradictions(manifest):
            raise BundleError(f"{path}: {contradiction}")


def _table_errors(manifest: Manifest) -> Iterator[str]:
    yield from _twice("table", (table.name for table in manifest.tables))
    for table in manifest.tables:
        where = f"table {table.name!r}"
        if not is_name(table.name):
            yield f"{where}: {_EXPECTED_NAME}"
        if table.rows <= 0 or table.dim <= 0:
            yield f"{where}: expected rows and dim > 0, got {table.rows} × {table.dim}"
        multiple = table.dtype.format.dim_multiple
        if manifest.part_of is not None:  # tables of hosts are shards, whose columns may be cut
            multiple = min(multiple, COLUMN_MULTIPLE)
        if table.dim % multiple:
            yield f"{where}: expected a dim that is a multiple of {multiple} for {table.dtype.value}, got {table.dim}"
        if table.policy_error is not None:
            yield f"{where}: {table.policy_error}"
        if table.id_map is not None and table.id_policy is not IdPolicy.ERROR:
            yield f"{where}: expected id_policy `error` with an id_map, got {table.id_policy.value!r}"
        if table.id_map is not None and (wrong := table.id_map.contradiction(table.rows)) is not None:
            yield f"{where}: id_map: {wrong}"
        if table.is_sequence and (table.weighted or manifest.part_of is not None):
            yield f"{where}: pooling: expected SUM or MEAN of a weighted table, and in the bundle of a host, got NONE"


def _feature_errors(manifest: Manifest) -> Iterator[str]:
    if not manifest.features:
        yield "features: expected at least one"
    yield from _twice("feature", (feature.name for feature in manifest.features))
    tables = {table.name: table for table in manifest.tables}
    for feature in manifest.features:
        where = f"feature {feature.name!r}"
        if not is_name(feature.name):
            yield f"{where}: {_EXPECTED_NAME}"
        if not is_name(feature.key):
            yield f"{where}: shared_key {feature.key!r}: {_EXPECTED_NAME}"
        if feature.table not in tables:
            yield f"{where}: no table {feature.table!r}"
        elif feature.position_weights is not None and not tables[feature.table].weighted:
            yield f"{where}: position_weights: expected them for a weighted table alone"
        if any(not abs(weight) <= _LARGEST_FP32 for weight in feature.position_weights or ()):
            yield f"{where}: position_weights: expected finite numbers of FP32"
    side_by_side = [feature for features in manifest.keys.values() for feature in features]
    for feature, expected in zip(manifest.features, side_by_side, strict=True):
        if feature != expected:
            yield f"feature {expected.name!r}: expected it beside the others of its key {expected.key!r}"


def _plan_errors(manifest: Manifest) -> Iterator[str]:
    plan, tables = manifest.plan, {table.name for table in manifest.tables}
    if not plan.ranks:
        yield "plan: ranks: expected at least one"
    for number, rank in enumerate(plan.ranks):
        alignment = ROW_ALIGNMENTS.get(rank.device)
        if alignment is None:
            devices = " or ".join(map(repr, ROW_ALIGNMENTS))
            made_for = f"was made for device {rank.device!r}, this is for {devices}"
            yield f"rank {number}: {made_for}: export it again for that"
        elif plan.row_alignment != alignment:
            yield f"plan: row_alignment: expected {alignment} on {rank.device}, got {plan.row_alignment}"
    for name in sorted(plan.sharding.keys() ^ tables):
        yield f"plan: sharding: expected each table once, got {'no' if name in tables else 'another'} table {name!r}"


def _host_errors(manifest: Manifest) -> Iterator[str]:
    elsewhere = [rank.host for rank in manifest.plan.ranks if rank.weights_file is None]
    if [host.host for host in manifest.hosts] != sorted(set(elsewhere)) or len(set(elsewhere)) < len(elsewhere):
        yield f"hosts: expected one entry for each rank without a file of weights, hosts {elsewhere}"
    own_ranks = [number for number, rank in enumerate(manifest.plan.ranks) if rank.weights_file is not None]
    if manifest.hosts and (manifest.part_of is not None or own_ranks != [0]):
        yield "hosts: expected a router's bundle, whose first rank, and no other, is its own"
    for host in manifest.hosts:
        if not host.is_possible or (host.lineage is None) != (manifest.compacted is None):
            yield (
                f"hosts: host {host.host}: expected the name of a model, a version and a SHA-256, and a lineage "
                f"if `compacted`, got {host.model!r}, {host.version} and {host.manifest!r}, and {host.lineage!r}"
            )
        if host.router is None or host.router != manifest.hosts[0].router:
            first = manifest.hosts[0]
            expected = host_model(first.router or "<router>", host.host)
            yield f"hosts: host {host.host}: expected the model {expected!r}, got {host.model!r}"
    yield from _twice("hosts: the bundle", (host.manifest for host in manifest.hosts))
    part = manifest.part_of
    if part is not None and (not part.is_possible or [rank.host for rank in manifest.plan.ranks] != [part.host]):
        yield (
            f"part_of: expected the name of a model, the host of the only rank and a SHA-256, got {part.model!r}, "
            f"{part.host} and {part.plan!r}"
        )


def _file_errors(manifest: Manifest) -> Iterator[str]:
    rank_of: dict[str, int] = {}
    for number, rank in enumerate(manifest.plan.ranks):
        name = rank.weights_file
        if name is None:
            continue
        if name in rank_of:
            yield f"rank {number}: expected a file of weights of its own, got {name!r}, also rank {rank_of[name]}'s"
        if name in _RESERVED or SCORES_FILES.fullmatch(name):
            yield f"rank {number}: expected a file of weights, got {name!r}, which is another file of a bundle"
        if not name or name != Path(name).name or name in (".", "..") or "\0" in name:
            yield f"rank {number}: files: {name!r} leaves the bundle"
        rank_of[name] = number
    used = {MODEL, *manifest.mapped_files}
    if manifest.dense_part is not None:
        used |= {*manifest.dense_part.file_names}
    for name in sorted(used ^ (manifest.files.keys() - {PROGRAM})):  # `requires` lists that file
        difference = "no" if name in used else "another"
        yield f"files: expected each file of the bundle but its manifest and signature, got {difference} {name!r}"


def _shard_errors(manifest: Manifest) -> Iterator[str]:
    plan, tables = manifest.plan, {table.name: table for table in manifest.tables}
    for number, shard in enumerate(plan.shards):
        if shard.table not in tables:
            yield f"plan: shard {number}: no table {shard.table!r}"
    for name, shards in plan.shards_by_table.items():
        table = tables[name]
        wrong = tiling_error(plan.sharding[name], table.rows, table.dim, shards, len(plan.ranks))
        if wrong is not None:
            yield f"table {name!r}: {wrong}"


def _offset_errors(manifest: Manifest) -> Iterator[str]:
    """Find shards that are misplaced in the weights files of their ranks."""
    plan, tables = manifest.plan, {table.name: table for table in manifest.tables}
    last: dict[int, tuple[int, Shard]] = {}
    for shard in sorted(plan.shards, key=lambda shard: shard.offset_bytes):
        where, file = _described(shard), plan.ranks[shard.rank].weights_file
        start, end = shard.offset_bytes, shard.offset_bytes + tables[shard.table].shard_bytes(shard)
        if file is None:
            continue
        size = manifest.files[file].size_bytes
        if start < 0 or end > size:
            yield f"{where}: bytes [{start}, {end}) are outside {file}, which has {size} bytes"
        if start % SHARD_ALIGNMENT:
            yield f"{where}: expected it at a multiple of {SHARD_ALIGNMENT} bytes in {file}, got {start}"
        reached, before = last.get(shard.rank, (0, shard))
        if start < reached:
            yield f"{where}: expected bytes of its own in {file}, got {start}, inside {_described(before)}"
        last[shard.rank] = (end, shard)


def _id_map_errors(manifest: Manifest) -> Iterator[str]:
    """Find id maps that are misplaced in their file."""
    regions = [
        (region, table.name)
        for table in manifest.tables
        if table.id_map is not None
        for region in table.id_map.regions
    ]
    reached = 0
    for (start, stop), name in sorted(regions):
        where = f"table {name!r}: id_map: bytes [{start}, {stop}) of {ID_MAPS_FILE}"
        if start < 0 or stop > manifest.files[ID_MAPS_FILE].size_bytes:
            yield f"{where} are outside of it: it has {manifest.files[ID_MAPS_FILE].size_bytes}"
        if start % SHARD_ALIGNMENT:
            yield f"{where}: expected them at a multiple of {SHARD_ALIGNMENT} bytes"
        if start < reached:
            yield f"{where}: expected bytes of their own"
        reached = stop


def _twice(what: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {name!r}: expected different names, got {count} of this one"


def _described(shard: Shard) -> str:
    (first_row, end_row), (first_column, end_column) = shard.rows, shard.columns
    return (
        f"table {shard.table!r}: shard of rows [{first_row}, {end_row}) × columns [{first_column}, {end_column}) "
        f"on rank {shard.rank}"
    )
