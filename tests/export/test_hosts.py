"""A router's bundle and those of its hosts: what is in them, and that N machines write what one writes."""

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import Tensor, nn

from export import ExportConfig, Sharding, complete_hosts, export_hosts, export_model, pipeline
from export.errors import ModelError, PublishError
from export.pipeline import finish, plan_model
from export.publish.draft import Draft
from export.trained.checkpoint import Checkpoint, module_weights
from export.trained.tables import TrainedTable, collect_tables
from serving.bundle.load import Bundle, open_bundle, verify_digests
from serving.bundle.plan import ROUTER, IdDtype
from serving.bundle.signature import TrustedKeys
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError
from serving.model.config_file import read_config, settings_of
from serving.model.settings import ServingSettings
from tests.support.bundle_reader import exported_table
from tests.support.hosts import MODEL, edit_manifest, in_one_process
from tests.support.models import MIXED, Spec, collection
from tests.support.sharded_exports import DTYPES

TYPES = {"user": "row_wise", "item": "column_wise", "genre": "data_parallel", "word": "table_row_wise"}
CONFIG = ExportConfig(
    dtype=DTYPES,
    sharding=Sharding(ranks=6, ranks_per_host=2, memory_bytes=1 << 20, types=TYPES, hosts_as_models=True),
)
MODELS = [MODEL, *(f"{MODEL}-host-{number}" for number in range(3))]


def mixed() -> nn.Module:
    """For `--model`."""
    module: nn.Module = collection(MIXED)
    return module


@pytest.fixture
def router(tmp_path: Path) -> Path:
    return export_model(mixed(), tmp_path / "r", MODEL, CONFIG)


@pytest.mark.usefixtures("fresh_process")
def test_each_host_has_its_own_bundle_and_the_router_names_all(tmp_path: Path, router: Path) -> None:
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == MODELS
    bundle = open_bundle(router)
    manifest = bundle.manifest
    assert [rank.host for rank in manifest.plan.ranks] == [ROUTER, 0, 1, 2]
    assert manifest.weights_files == {"weights.0.bin"}
    for host in manifest.hosts:
        part = open_bundle(tmp_path / "r" / host.model / str(host.version))
        verify_digests(part)
        content = (part.path / "manifest.json").read_bytes()
        assert host.manifest == part.digest == hashlib.sha256(content).hexdigest()
        assert part.manifest.part_of is not None
        assert (part.manifest.part_of.model, part.manifest.part_of.host) == (MODEL, host.host)
        assert part.manifest.part_of.plan == manifest.placement_digest
        assert part.manifest.id_dtype is IdDtype.INT32
        assert len(part.manifest.plan.ranks) == 1
        assert {parity.table for parity in part.manifest.parity} == {table.name for table in part.manifest.tables}
    assert [shard.table for shard in manifest.plan.shards if shard.rank == 0] == ["genre"]


def test_the_hosts_together_hold_every_row_once(tmp_path: Path, router: Path) -> None:
    """By an oracle that reads bytes alone: what hosts' bundles hold is what one process holds."""
    one = in_one_process(tmp_path, mixed(), CONFIG, router)
    manifest = open_bundle(router).manifest
    rows_by_table = {spec.name: np.full((spec.rows, spec.dim), np.nan, np.float32) for spec in MIXED}
    for host in manifest.hosts:
        bundle = tmp_path / "r" / host.model / "1"
        for table in open_bundle(bundle).manifest.tables:
            name, rows, columns = _slice(table.name)
            assert np.isnan(rows_by_table[name][rows, columns]).all()
            rows_by_table[name][rows, columns] = exported_table(bundle, table.name)
    for name, numbers in rows_by_table.items():
        if name == "genre":
            assert np.isnan(numbers).all()
        else:
            np.testing.assert_array_equal(numbers, exported_table(one, name))


def _slice(name: str) -> tuple[str, slice, slice]:
    """The table, rows and columns that the name of a shard says: item[0:150][16:32]."""
    table, *cuts = name.replace("]", "").split("[")
    slices = [slice(*(int(end) if end else None for end in cut.split(":"))) for cut in cuts]
    rows, columns = [*slices, slice(None), slice(None)][:2]
    return table, rows, columns


class Counted(Checkpoint):
    """A module's weights; which rows were read is remembered."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = module_weights(module, collect_tables(module).tables)
        self.read: dict[str, set[int]] = {spec.name: set() for spec in MIXED}

    def check(self, table: TrainedTable) -> None:
        self._weights.check(table)

    def rows(self, table: TrainedTable, start: int, stop: int) -> Tensor:
        self.read[table.name] |= set(range(start, stop))
        return self._weights.rows(table, start, stop)


def test_several_machines_write_the_same_hosts_as_one_machine(tmp_path: Path, router: Path) -> None:
    module = mixed()
    several = tmp_path / "several"
    for host in (2, 0, 1):
        weights = Counted(module)
        (path,) = export_hosts(module, several, MODEL, [host], CONFIG, 1, checkpoint=weights)
        assert path == several / f"{MODEL}-host-{host}" / "1"
        shards_here = [shard for shard in open_bundle(router).manifest.plan.shards if shard.rank == host + 1]
        for spec in MIXED:
            expected = {row for shard in shards_here if shard.table == spec.name for row in range(*shard.rows)}
            assert weights.read[spec.name] == expected, "it read rows of other hosts"
    weights = Counted(module)
    published = complete_hosts(module, several, MODEL, CONFIG, 1, checkpoint=weights)
    assert {name for name, rows in weights.read.items() if rows} == {"genre"}
    assert published == several / MODEL / "1"
    for model in MODELS:
        ours, router_manifest = (open_bundle(folder / model / "1").manifest for folder in (several, tmp_path / "r"))
        assert ours.placement_digest == router_manifest.placement_digest
        names = ours.weights_files
        assert {name: ours.files[name] for name in names} == {name: router_manifest.files[name] for name in names}
        for mine, other in zip(ours.parity, router_manifest.parity, strict=True):
            assert mine.quantized.largest <= other.quantized.largest
    ours, router_manifest = open_bundle(published).manifest, open_bundle(router).manifest
    for mine, other in zip(ours.parity, router_manifest.parity, strict=True):
        assert mine.quantized.largest == other.quantized.largest
        assert mine.quantized.mean == pytest.approx(other.quantized.mean, rel=1e-6)
        assert mine.quantized.cosine == pytest.approx(other.quantized.cosine, abs=1e-4)
        assert mine.quantized.worst_row == other.quantized.worst_row


def damage(bundle: Path) -> None:
    path = bundle / "weights.0.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def belongs_elsewhere(bundle: Path) -> None:
    part = open_bundle(bundle).manifest.part_of
    assert part is not None
    edit_manifest(bundle, part_of=msgspec.structs.replace(part, plan="0" * 64))


def missing(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()


def without_parity(bundle: Path) -> None:
    edit_manifest(bundle, parity=())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (missing, "manifest.json: cannot be read"),
        (damage, "weights.0.bin: expected SHA-256"),
        (belongs_elsewhere, "expected a part of this plan of 'movies', got one of another"),
        (without_parity, "parity: expected each table once, got no table"),
    ],
)
def test_a_router_is_not_published_without_all_its_hosts(
    tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    module = mixed()
    export_hosts(module, tmp_path / "r", MODEL, [0, 1, 2], CONFIG, 4)
    for host in (0, 2):
        harm(tmp_path / "r" / f"{MODEL}-host-{host}" / "4")
    with pytest.raises(PublishError) as refused:
        complete_hosts(module, tmp_path / "r", MODEL, CONFIG, 4)
    first, *lines = str(refused.value).splitlines()
    assert first == "the set is not complete:"
    assert [line.split(":")[0] for line in lines] == ["host 0", "host 2"]
    assert all(message in line for line in lines)
    assert not (tmp_path / "r" / MODEL).exists()


@pytest.mark.usefixtures("router")
def test_versions_are_the_same_for_all_of_a_set(tmp_path: Path) -> None:
    export_hosts(mixed(), tmp_path / "r", MODEL, [1], CONFIG, 5)
    newer = export_model(mixed(), tmp_path / "r", MODEL, CONFIG)
    assert newer.name == "6"
    assert {host.version for host in open_bundle(newer).manifest.hosts} == {6}
    with pytest.raises(PublishError, match=r"movies-host-1/5: exists"):
        export_model(mixed(), tmp_path / "r", MODEL, CONFIG, 5)


def test_a_failed_host_export_publishes_no_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_router(new: Draft, *arguments: Any) -> Bundle:
        if new.name == MODEL:
            raise PublishError("no")
        return finish(new, *arguments)

    monkeypatch.setattr(pipeline, "finish", refuse_router)
    with pytest.raises(PublishError):
        export_model(mixed(), tmp_path / "r", MODEL, CONFIG)
    assert list((tmp_path / "r").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize(
    ("hosts", "message"), [([3], "expected hosts of the plan, 0 to 2, got 3"), ([0, -1], "got -1")]
)
def test_hosts_that_the_plan_does_not_have_are_refused(tmp_path: Path, hosts: Sequence[int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        export_hosts(mixed(), tmp_path / "r", MODEL, hosts, CONFIG, 1)


@pytest.mark.parametrize(
    ("specs", "types", "message"),
    [
        (
            (Spec("a", 100, 8, "SUM", ("x",)), Spec("b", 60, 8, "SUM", ("x#0", "x#1"))),
            {"*": "table_wise", "a": "row_wise"},
            r"host (\d): features 'x' and 'x#\1' would both have a segment 'x#\1'",
        ),
        (
            (Spec("a", 100, 8, "SUM", ("x",)), Spec("a[0:50]", 160, 8, "SUM", ("y",))),
            {"a": "row_wise", "a[[]0:50]": "table_wise"},
            r"host 0: tables 'a' and 'a\[0:50\]' would both have a shard 'a\[0:50\]'",
        ),
    ],
    ids=["features", "tables"],
)
def test_names_that_collide_on_a_host_are_refused_before_rows_are_read(
    specs: tuple[Spec, ...], types: dict[str, str], message: str
) -> None:
    sharding = Sharding(ranks=2, ranks_per_host=1, memory_bytes=1 << 20, types=types, hosts_as_models=True)
    with pytest.raises(ModelError, match=f"^{message}: rename one"):
        plan_model(collection(specs), ExportConfig(sharding=sharding))


def test_hosts_that_are_no_models_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, sharding=replace(CONFIG.sharding, hosts_as_models=False))
    with pytest.raises(ConfigurationError, match="expected --hosts-as-models"):
        export_hosts(mixed(), tmp_path / "r", MODEL, [0], config, 1)


def test_hosts_get_no_settings_of_routers(tmp_path: Path) -> None:
    serving = ServingSettings(instances=2, hosts={"0": "a:1", "1": "b:1", "2": "c:1"}, shard_timeout_ms=50)
    export_model(mixed(), tmp_path / "r", MODEL, replace(CONFIG, serving=serving))
    assert settings_of(read_config(tmp_path / "r" / MODEL)) == serving
    assert settings_of(read_config(tmp_path / "r" / f"{MODEL}-host-1")) == ServingSettings(instances=2)


def test_every_bundle_of_a_set_is_signed(tmp_path: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    for command in (
        ["genpkey", "-algorithm", "ed25519", "-out", private],
        ["pkey", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True)
    export_model(mixed(), tmp_path / "r", MODEL, CONFIG, signing_key=private)
    trusted = TrustedKeys.read(public)
    for model in MODELS:
        open_bundle(tmp_path / "r" / model / "1", trusted)
    edit_manifest(tmp_path / "r" / MODELS[2] / "1", exported_at=0.0)
    with pytest.raises(BundleError):
        open_bundle(tmp_path / "r" / MODELS[2] / "1", trusted)


def test_a_router_needs_its_hosts(router: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected addresses for hosts 0 \(movies-host-0\)"):
        Engine.open(router)
