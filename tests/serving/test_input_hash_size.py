"""HashZch with an `input_hash_size`: TorchRec's module, run eagerly in eval, says which ids there are and what they read.

Such a module deals its ids out to the buckets in equal runs, and fails for ids behind the last one.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export import ExportConfig, Sharding, export_model
from export.errors import CheckpointError
from export.trained.probe_request import make_probe
from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.load import open_bundle
from serving.bundle.manifest import MANIFEST, Capability
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import BundleError, IdsOutside, InternalError, InvalidRequest
from serving.requests.id_maps import IdMaps, known_of_keys
from tests.serving.test_id_maps import FP32
from tests.support.checkpoint_files import save_dcp
from tests.support.commands import tbe_export
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.long_cases import fewer_examples, one_in
from tests.support.managed_collision import (
    assert_equal,
    assert_right,
    collection_behind,
    dealt,
    fill,
    managed,
    mch,
    right,
    undealt,
    zch,
)
from tests.support.models import Spec
from tests.support.servers import at_once, metric, running

LARGEST = 2**63 - 1
# Buckets, and an input_hash_size: one that they divide, some that they do not, fewer ids than buckets, and the most.
SIZES = [(1, 100), (2, 100), (3, 100), (7, 100), (4, 2), (5, 1), (3, 2**40 + 1), (1, LARGEST), (2, LARGEST)]
POOLINGS = ["SUM", "MEAN", "NONE"]
OUTSIDE = "feature 'x': expected an id in [0, {}), got {} for sample 0 (values[0])"


def end_of(buckets: int, size: int) -> int:
    return buckets * -(-size // buckets)


def opened(module: Any, folder: Path, config: ExportConfig = FP32) -> Engine:
    return Engine.open(export_model(module, folder / "r", "m", config))


def bags(ids: Any) -> dict[str, list[list[int]]]:
    """A bag for each id, and one with all."""
    ids = [int(id_) for id_ in ids]
    return {"x": [*([id_] for id_ in ids), ids], "y": [[]] * (len(ids) + 1)}


def remapping(module: Any) -> Any:
    (collision_module,) = module._managed_collision_collection._managed_collision_modules.values()
    return collision_module


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("buckets", "size"), one_in(3, SIZES))
@pytest.mark.parametrize("pooling", one_in(2, ["SUM", "NONE"]))
def test_ids_and_edges_are_those_of_torchrec(
    buckets: int, size: int, divided: bool, pooling: str, tmp_path: Path
) -> None:
    module = dealt(buckets, size, divided, pooling)
    engine = opened(module, tmp_path)
    end = end_of(buckets, size)
    block = end // buckets
    edges = {0, size - 1, size, end - 1, end, -1, -(2**63), LARGEST, block - 1, block, 101, 102, 2**31, -block, -end}
    random_ids = np.random.default_rng(1).integers(0, size, 50).tolist()
    identities = remapping(module)._hash_zch_identities.ravel().tolist()
    known_ids = [x + (row // 12 * block if divided else 0) for row, x in enumerate(identities) if x >= 0]
    ids = {id_ for id_ in {*edges, *random_ids, *known_ids, *range(min(size, 200))} if -(2**63) <= id_ <= LARGEST}
    inside = sorted(id_ for id_ in ids if 0 <= id_ < end)
    assert_right(engine.lookup(bags(inside)), module, bags(inside))
    for id_ in sorted(ids - {*inside}):
        with pytest.raises(IndexError):
            right(module, {"x": [[id_]], "y": [[]]})
        with pytest.raises(IdsOutside) as refused:
            engine.lookup({"x": [[id_]], "y": [[0]]})
        assert str(refused.value) == OUTSIDE.format(min(end, 2**63), id_)
        assert refused.value.counts == {"dealt": 1}
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)


@fewer_examples
@given(data=st.data())
def test_random_modules_answer_as_torchrec_runs_them(data: st.DataObject, tmp_path_factory: Any) -> None:
    pooling = data.draw(st.sampled_from(POOLINGS))
    segments = np.cumsum([0, *data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5), label="buckets")])
    rows, buckets = int(segments[-1]), segments.size - 1
    size = data.draw(st.integers(1, 300) | st.integers(1, LARGEST), label="size")
    module: Any = collection_behind(
        {
            "a": zch(
                rows,
                buckets,
                output_segments=segments.tolist(),
                max_probe=data.draw(st.integers(1, 20)),
                input_hash_size=size,
                inference_dispatch_div_train_world_size=data.draw(st.booleans(), label="divided"),
            ),
            "b": mch(30),
        },
        [Spec("a", rows, 8, pooling, ("x",)), Spec("b", 30, 8, pooling, ("y",))],
    ).eval()
    least = min(size, end_of(buckets, size) - 1, LARGEST)
    ids = st.integers(0, least) | st.integers(max(0, least - 5), least)
    part = module._managed_collision_collection._managed_collision_modules["a"]
    fill(part, data.draw(st.lists(ids, max_size=40), label="trained"))
    ranks = data.draw(st.integers(1, 2))
    kind = data.draw(st.sampled_from(["row_wise", "table_wise", "column_wise", "data_parallel"]))
    kind = "table_wise" if rows < ranks else kind
    sharding = Sharding(ranks=ranks, types={"*": kind}) if ranks > 1 else Sharding()
    engine = opened(module, tmp_path_factory.mktemp("random"), ExportConfig(dtype=FP32.dtype, sharding=sharding))
    request = {
        "x": data.draw(st.lists(st.lists(ids, max_size=5), min_size=3, max_size=3)),
        "y": [[-5], [], [LARGEST, 7]],
    }
    assert_right(engine.lookup(request), module, request)


@pytest.mark.parametrize("divided", [False, True])
def test_known_and_unknown_ids_read_different_rows(divided: bool, tmp_path: Path) -> None:
    """The oracle says something: known ids are off the row of their hash, and the map has no marks of empty rows."""
    module = dealt(3, 100, divided)
    part = remapping(module)
    identities = part._hash_zch_identities.clone()
    assert (identities == -1).any()
    engine = opened(module, tmp_path)
    (table,) = engine.bundle.manifest.tables
    assert table.id_map is not None
    assert table.id_map.known == int((identities != -1).sum()) > 15
    maps = IdMaps.of(engine.bundle.path, engine.bundle.manifest)
    assert maps is not None
    known_ids = known_of_keys(maps.known, engine.bundle.manifest)["x"]
    assert known_ids.size == table.id_map.known
    assert 0 <= known_ids.min() < known_ids.max() < 102
    before = right(module, bags(known_ids))["x"]
    part._hash_zch_identities.fill_(-1)
    assert not torch.equal(before, right(module, bags(known_ids))["x"])


def test_an_untrained_module_answers_like_torchrec(tmp_path: Path) -> None:
    module = undealt().eval()
    assert_right(opened(module, tmp_path).lookup(bags(range(102))), module, bags(range(102)))


@pytest.mark.parametrize("divided", one_in(2, [True, False]))
def test_unreachable_identities_change_no_answer(divided: bool, tmp_path: Path) -> None:
    """A checkpoint of another input_hash_size: TorchRec loads it, and does not find what it has in another bucket."""
    module = dealt(3, 100, divided)
    identities = remapping(module)._hash_zch_identities
    identities[:12, 0] = torch.tensor([0, 33, 34, 101, 102, -2, -(2**63), LARGEST, -1, 5, 5, 2**62])
    engine = opened(module, tmp_path)
    assert_right(engine.lookup(bags(range(102))), module, bags(range(102)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("pooling", one_in(2, ["SUM", "NONE"]))
def test_a_checkpoint_is_exported_as_the_module_is(pooling: str, tmp_path: Path) -> None:
    module = dealt(pooling=pooling)
    expected = export_model(module, tmp_path / "module", "m")
    checkpoint = save_dcp(module.state_dict(), tmp_path)
    bundle = export_model(undealt(pooling=pooling), tmp_path / "r", "m", checkpoint=checkpoint)
    assert open_bundle(bundle).manifest.tables == open_bundle(expected).manifest.tables
    assert (bundle / ID_MAPS_FILE).read_bytes() == (expected / ID_MAPS_FILE).read_bytes()
    other = collection_behind({"dealt": zch(36, 2, input_hash_size=100)}, [Spec("dealt", 36, 8, pooling, ("x", "y"))])
    with pytest.raises(CheckpointError, match="expected a checkpoint of 2 buckets, as the module has, got one of 3"):
        export_model(other, tmp_path / "r", "m", checkpoint=checkpoint)


def test_verify_and_inspect_know_input_hash_size(tmp_path: Path) -> None:
    module = dealt()
    bundle = export_model(module, tmp_path / "r", "m")
    manifest = open_bundle(bundle).manifest
    assert Capability.INPUT_HASH_SIZE in manifest.requires
    assert tbe_export("verify", str(bundle)).exit_code == 0
    torch.save(module.state_dict(), tmp_path / "w.pt")
    given_both = ("--model", "tests.support.managed_collision:undealt", "--checkpoint", str(tmp_path / "w.pt"))
    assert tbe_export("verify", str(bundle), *given_both).exit_code == 0
    shown = " ".join(tbe_export("inspect", str(bundle)).stdout.split())
    assert "known·h" in shown
    assert "below the module's input_hash_size" in shown


def test_bundles_without_input_hash_size_do_not_require_it(tmp_path: Path) -> None:
    bundle = export_model(managed(), tmp_path / "r", "m")
    assert open_bundle(bundle).manifest.requires == (Capability.ID_MAPS,)
    assert "input_hash_size" not in (bundle / MANIFEST).read_text()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        pytest.param(0, r"input_hash_size: expected a number from 1 to 2⁶³ − 1, got 0", id="none"),
        pytest.param(-1, "got -1", id="negative"),
        pytest.param(2**63, f"got {2**63}", id="large"),
        pytest.param(None, "table 'dealt': input_hash_size: expected a number, or no such key, got null", id="null"),
        pytest.param("100", "Expected `int", id="text"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(size: Any, message: str, tmp_path: Path) -> None:
    bundle = export_model(dealt(), tmp_path / "r", "m")
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["tables"][0]["id_map"]["hashed"]["input_hash_size"] = size
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle)


def test_a_damaged_map_never_reaches_fbgemm(tmp_path: Path) -> None:
    """It is not taken for a wrong request, nor a wrong request for it."""
    engine = opened(dealt(), tmp_path)
    path, (table,) = engine.bundle.path, engine.bundle.manifest.tables
    assert table.id_map is not None
    entries = np.fromfile(path / ID_MAPS_FILE, "<i8", 2 * table.id_map.capacity, offset=table.id_map.entries_offset)
    entries[1::2] = np.where(entries[1::2] < 0, -1, table.rows)
    with (path / ID_MAPS_FILE).open("r+b") as file:
        file.seek(table.id_map.entries_offset)
        file.write(entries.tobytes())
    with pytest.raises(InternalError, match=r"ids\.bin: expected rows of its tables, got others"):
        engine.lookup({"x": [[0]], "y": [[]]})
    with pytest.raises(InternalError, match=r"ids\.bin: expected rows of its tables, got others"):
        engine.lookup({"x": [[0, -1]], "y": [[]]})
    with pytest.raises(IdsOutside):
        engine.lookup({"x": [[-1]], "y": [[]]})


def both() -> Any:
    """A key that two tables read, whose modules take other ids; and one that takes row numbers."""
    other = collection_behind(
        {"other": zch(20, 2, input_hash_size=50), "word": mch(30)},
        [Spec("other", 20, 8, "SUM", ("x",)), Spec("word", 30, 8, "SUM", ("y",))],
        seed=1,
    ).eval()
    return torch.nn.ModuleDict({"first": dealt(), "second": other})


def test_tables_with_different_id_ranges_read_one_key(tmp_path: Path) -> None:
    module = both()
    engine = opened(module, tmp_path)
    manifest = engine.bundle.manifest
    assert manifest.rows_of_keys == {"x": 50, "y": 102}
    maps = IdMaps.of(engine.bundle.path, manifest)
    assert maps is not None
    known_ids = known_of_keys(maps.known, manifest)
    assert known_ids["x"].max() < 50 <= known_ids["y"].max()
    probe = make_probe(manifest, known_ids)
    ends = probe.lengths.reshape(2, -1).sum(axis=1).cumsum()
    for ids, end in zip(np.split(probe.values, ends[:1]), (50, 102), strict=True):
        assert (ids.min(), ids.max()) == (0, end - 1)
    assert all(parity.trained is not None for parity in manifest.parity)
    request = {"x": [[0, 49], [3]], "y": [[101], [7, 7]]}
    answer = engine.lookup(request)
    for name, part in module.items():
        expected = right(part, request)
        for table in manifest.tables:
            for feature in manifest.features:
                if feature.table == table.name and (table.name == "dealt") == (name == "first"):
                    assert_equal(answer[feature.name], expected[feature.key], feature.name)
    with pytest.raises(IdsOutside, match=r"feature 'x@other': expected an id in \[0, 50\), got 50 for sample 0"):
        engine.lookup(request | {"x": [[50], []]})
    with pytest.raises(IdsOutside, match=r"feature 'y@dealt': expected an id in \[0, 102\), got -1 for sample 1"):
        engine.lookup(request | {"y": [[], [-1]]})


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
def test_merged_requests_are_answered_like_torchrec(pooling: str, tmp_path: Path) -> None:
    """Requests that come together; those with ids outside hurt nobody, and are counted."""
    module = dealt(pooling=pooling)
    export_model(module, tmp_path / "r", "m", FP32)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        good = [bags(range(start, start + 8)) for start in range(20)]
        bad: list[Any] = [{"x": [[5, 102]], "y": [[3, -1]]}, {"x": [[0]], "y": [[-1]]}]
        answers = at_once([partial(client.lookup, request) for request in [*good, *bad]])
        for request, answer in zip(good, answers[:20], strict=True):
            assert_right(answer, module, request)
        assert [type(answer) for answer in answers[20:]] == [InvalidRequest] * 2
        assert r"feature 'x': expected an id in [0, 102), got 102 for sample 0" in str(answers[20])
        assert r"feature 'y': expected an id in [0, 102), got -1 for sample 0" in str(answers[21])
        assert metric(server, "tbe_ids_outside_total", table="dealt") == 3
        assert metric(server, "tbe_rejected_total", reason="ids") == 2
        expected: Any = right(module, bags([0, 7, 101]))["x"]
        expected = expected[:3] if isinstance(expected, torch.Tensor) else expected.values()[:3]
        np.testing.assert_array_equal(client.rows("dealt", [0, 7, 101]), expected)
        with pytest.raises(InvalidRequest, match=r"table 'dealt': expected an id in \[0, 102\), got 102"):
            client.rows("dealt", [0, 102])


@pytest.mark.long
def test_a_router_answers_like_torchrec(tmp_path: Path) -> None:
    module = dealt(4, 101)
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"dealt": "row_wise"})
    router = export_hosts(tmp_path, module, ExportConfig(dtype=FP32.dtype, sharding=sharding))
    assert open_bundle(router).manifest.requires == (Capability.HOSTS, Capability.ID_MAPS, Capability.INPUT_HASH_SIZE)
    for host in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / host.model / str(host.version)).manifest
        assert Capability.HOSTS in part.requires
        assert all(table.id_map is None for table in part.tables)
    assert tbe_export("verify", str(router)).exit_code == 0
    with fleet(tmp_path, router) as served, LookupClient(served.router.grpc, MODEL, 60) as client:
        assert_right(client.lookup(bags(range(104))), module, bags(range(104)))
        with pytest.raises(InvalidRequest, match=r"feature 'x': expected an id in \[0, 104\), got 104"):
            client.lookup(bags([104]))
