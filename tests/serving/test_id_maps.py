"""Raw ids: TorchRec's ManagedCollisionEmbedding(Bag)Collection, run eagerly in eval on a KJT, is the oracle."""

import json
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export import ExportConfig, Sharding, WeightDtype, export_model
from export.errors import ModelError
from export.trained.managed import looking_up
from serving.bundle.digests import digest_file
from serving.bundle.id_maps import IDS
from serving.bundle.manifest import MANIFEST
from serving.bundle.opening import open_bundle, verify_digests
from serving.client import LookupClient, Sequence
from serving.engine import Engine
from serving.errors import BundleError, InternalError, InvalidRequest
from tests.support.commands import tbe_export
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.lookups import lookup_async
from tests.support.managed import KEYS, POLICIES, ROWS, SPECS, bags_of, behind, kjt_of, managed, mch, trained, zch
from tests.support.models import Bags, Spec, collection
from tests.support.servers import at_once, metric, running

pytestmark = pytest.mark.usefixtures("quick_reload")

FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})
BOTH = [pytest.param(SPECS, id="pooled"), pytest.param(ROWS, id="sequences")]


def right(module: Any, bags: Mapping[str, Bags], *, weighted: bool = False) -> dict[str, Any]:
    """What the module itself answers, by feature: a tensor, or a JaggedTensor where nothing is pooled."""
    with torch.no_grad(), looking_up(module):
        answer = module(kjt_of(bags, weighted=weighted))[0]
        return answer if isinstance(answer, dict) else answer.to_dict()


def assert_equal(ours: Any, theirs: Any, name: str) -> None:
    """That the answer for a feature is the module's; that of a sequence bit for bit."""
    if isinstance(ours, Sequence):
        np.testing.assert_array_equal(ours.values, theirs.values(), err_msg=name)
        np.testing.assert_array_equal(ours.lengths, theirs.lengths(), err_msg=name)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5, err_msg=name)


def assert_right(answer: Any, module: Any, bags: Mapping[str, Bags]) -> None:
    if not any(bags.values()):  # without samples, TorchRec's KJT cannot be taken apart
        assert {len(rows) for rows in answer.values()} == {0}
        return
    expected = right(module, bags)
    assert answer.keys() == expected.keys()
    for name, theirs in expected.items():
        assert_equal(answer[name], theirs, name)


@given(data=st.data())
@settings(max_examples=40)
def test_random_modules_answer_as_torchrec_runs_them(data: st.DataObject, tmp_path_factory: Any) -> None:
    modules: dict[str, Any] = {}
    specs: list[Spec] = []
    pooling = data.draw(st.sampled_from([["SUM", "MEAN"], ["NONE"]]), label="pooling")
    for number, read in enumerate(data.draw(st.sampled_from([["a"], ["ab", "c"], ["c", "a", "b"]]), label="keys")):
        buckets = data.draw(st.integers(1, 4), label="buckets")
        rows = buckets * data.draw(st.integers(1, 40), label="rows of a bucket")
        specs.append(Spec(f"t{number}", rows, 8, data.draw(st.sampled_from(pooling)), tuple(read)))
        modules[f"t{number}"] = data.draw(
            st.one_of(
                st.builds(mch, st.just(rows), st.sampled_from(POLICIES)),
                st.builds(
                    zch,
                    st.just(rows),
                    st.just(buckets),
                    max_probe=st.integers(1, 20),
                    inference_dispatch_div_train_world_size=st.booleans(),
                    track_id_freq=st.booleans(),
                ),
            )
        )
    keys = [key for spec in specs for key in spec.features]
    seed = data.draw(st.integers(0, 1000))
    asked = data.draw(st.permutations(keys), label="the order of keys in training")
    module = trained(behind(modules, specs, seed=seed), seed, data.draw(st.integers(0, 5), label="steps"), asked)
    ranks = data.draw(st.integers(1, 3), label="ranks")
    kind = data.draw(st.sampled_from(["row_wise", "table_wise", "column_wise", "data_parallel"]))
    kind = "table_wise" if kind == "row_wise" and min(spec.rows for spec in specs) < ranks else kind
    sharding = Sharding(ranks=ranks, types={"*": kind}) if ranks > 1 else Sharding()
    config = ExportConfig(dtype=FP32.dtype, sharding=sharding)
    engine = Engine.open(export_model(module, tmp_path_factory.mktemp("random") / "r", "m", config))
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)
    random = np.random.default_rng(seed)
    for size in (0, 1, 5, 40):
        bags = bags_of(random, size, keys)
        assert_right(engine.lookup(bags), module, bags)
    some = {key: bags[key] for key in keys[-1:]}
    expected = right(module, bags)
    for name, answer in engine.lookup(some).items():
        assert_equal(answer, expected[name], name)


@pytest.mark.parametrize("specs", BOTH)
def test_what_is_known_is_not_what_is_unknown(specs: Several[Spec]) -> None:
    """The oracle says something: training has filled maps, and known ids read rows of their own."""
    module: Any = managed(specs)
    for part in module._managed_collision_collection._managed_collision_modules.values():
        state = part.state_dict()
        ids = state.get("_mch_sorted_raw_ids", state.get("_hash_zch_identities")).ravel()
        assert len(set(ids.tolist()) - {-1, 2**63 - 1}) > 30


@pytest.mark.parametrize("specs", BOTH)
def test_every_dtype_and_every_command(specs: Several[Spec], tmp_path: Path) -> None:
    module = managed(specs)
    dtype = {"user": WeightDtype.INT8, "item": WeightDtype.INT4, "word": WeightDtype.INT2}
    bundle = export_model(module, tmp_path / "r", "m", ExportConfig(dtype=dtype))
    manifest = open_bundle(bundle).manifest
    assert manifest.format_version == 7
    assert all(parity.trained is not None and parity.trained.cosine > 0.6 for parity in manifest.parity)
    assert tbe_export("verify", str(bundle)).exit_code == 0
    shown = tbe_export("inspect", str(bundle)).stdout
    assert "known·m" in shown
    assert "any int64 is an id" in shown


def test_weights_of_ids_are_those_that_were_sent(tmp_path: Path) -> None:
    specs = [Spec("a", 40, 8, "SUM", ("x", "y")), Spec("b", 30, 8, "SUM", ("z",))]
    module = trained(behind({"a": mch(40), "b": zch(30)}, specs, weighted=True), keys="xyz")
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    bags = bags_of(np.random.default_rng(3), 7, "xyz")
    expected = right(module, bags, weighted=True)
    for name, rows in engine.lookup(kjt_of(bags, weighted=True)).items():
        np.testing.assert_allclose(rows, expected[name], rtol=1e-6, atol=1e-5, err_msg=name)
    assert all(parity.trained is not None for parity in engine.bundle.manifest.parity)


def test_beside_a_collection_of_row_numbers(tmp_path: Path) -> None:
    """Tables with and without a map read one key: its ids are row numbers of the one without, and raw for the other."""
    own = [Spec("own", 40, 8, "SUM", ("x", "recent"))]
    module = torch.nn.ModuleDict({"managed": managed(), "own": collection(own)})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    assert engine.bundle.manifest.rows_of_keys["recent"] == 40
    bags = bags_of(np.random.default_rng(0), 6) | {"recent": [[1, 39], [0], [], [7], [7], [3]], "x": [[1]] * 6}
    answer = engine.lookup(bags)
    expected = right(module["managed"], {key: bags[key] for key in KEYS})
    for name, rows in expected.items():
        served = answer["recent@item" if name == "recent" else name]
        np.testing.assert_allclose(served, rows, rtol=1e-6, atol=1e-5, err_msg=name)
    with pytest.raises(InvalidRequest, match=r"feature 'recent@own': expected an id in \[0, 40\), got 40"):
        engine.lookup(bags | {"recent": [[40], [], [], [], [], []]})
    with pytest.raises(InvalidRequest, match=r"feature 'x': expected an id in \[0, 40\), got -1"):
        engine.lookup({"x": [[-1]], "words": [[-1]]})


def test_sequences_beside_what_is_pooled(tmp_path: Path) -> None:
    """Tables of both read the same keys, each through a map of its own."""
    module = torch.nn.ModuleDict({"pooled": managed(), "rows": trained(managed(ROWS), seed=9)})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    bags = bags_of(np.random.default_rng(4), 6)
    answer = engine.lookup(bags)
    assert len(answer) == 2 * len(KEYS)
    for path, collection_of in module.items():
        expected = right(collection_of, bags)
        for spec in SPECS:
            for key in spec.features:
                assert_equal(answer[f"{key}@{path}.{spec.name}"], expected[key], key)


class Ranker(torch.nn.Module):
    """A whole model: what follows the collection takes its embeddings, and a dense input."""

    def __init__(self, *, remapped: bool = False) -> None:
        super().__init__()
        self.sparse = managed()
        self.over = torch.nn.Linear(16 + 32 + 32 + 24 + 5, 1)
        self.remapped = remapped

    def forward(self, features: Any, dense: torch.Tensor) -> torch.Tensor:
        pooled, ids = self.sparse(features)
        scores: torch.Tensor = self.over(torch.cat([pooled.values(), dense], dim=1))
        return scores + ids if self.remapped else scores


def test_scores_of_raw_ids(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Ranker().eval()
    config = ExportConfig(dtype=FP32.dtype, scores=True, dense_widths={"dense": 5})
    engine = Engine.open(export_model(module, tmp_path / "r", "m", config))
    bags, dense = bags_of(np.random.default_rng(2), 9), torch.randn(9, 5)
    with torch.no_grad(), looking_up(module):
        expected = module(kjt_of(bags), dense)
    scores: Any = engine.score(bags, {"dense": dense.numpy()})["scores"]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    assert engine.bundle.manifest.dense_part is not None
    assert all(each.parity.trained is not None for each in engine.bundle.manifest.dense_part.outputs)
    with pytest.raises(ModelError, match=r"sparse: expected its embeddings alone to be used"):
        export_model(Ranker(remapped=True), tmp_path / "none", "m", config)


def test_scores_behind_sequences_are_refused_by_name(tmp_path: Path) -> None:
    class Scored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = managed(ROWS)

        def forward(self, features: Any) -> Any:
            return self.rows(features)[0]["words"].values()

    with pytest.raises(ModelError, match=r"rows \(ManagedCollisionEmbeddingCollection\): scores are made of emb"):
        export_model(Scored(), tmp_path / "r", "m", ExportConfig(scores=True))


def check_served(lookup: Callable[[Any], Any], module: Any) -> None:
    """Requests that come together; some of them are wrong, and hurt nobody."""
    asked = [bags_of(np.random.default_rng(seed), seed % 9) for seed in range(24)]
    some = {key: asked[5][key] for key in ("words", "item_id")}
    answers = at_once([partial(lookup, each) for each in [*asked, some, {"nobody": [[1]]}]])
    for request, answer in zip(asked, answers[:24], strict=True):
        assert_right(answer, module, request)
    whole = right(module, asked[5])
    for name, answer in answers[24].items():
        assert_equal(answer, whole[name], name)
    assert isinstance(answers[25], InvalidRequest)


def check_rows(rows: Callable[[str, Any], Any], module: Any) -> None:
    """Rows of a table, by raw ids: those of bags of one id."""
    ids = [id_ for bag in bags_of(np.random.default_rng(11), 5)["user_id"] for id_ in bag]
    bags: dict[str, Bags] = {key: [[]] * len(ids) for key in KEYS}
    expected = right(module, bags | {"user_id": [[each] for each in ids]})["user_id"]
    expected = expected if isinstance(expected, torch.Tensor) else expected.values()
    np.testing.assert_array_equal(rows("user", ids), expected)


@pytest.mark.parametrize("specs", BOTH)
def test_served_and_merged(specs: Several[Spec], tmp_path: Path) -> None:
    module = managed(specs)
    export_model(module, tmp_path / "r", "m", FP32)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        check_served(client.lookup, module)
        assert metric(server, "tbe_calls_total") < 26
        check_rows(client.rows, module)
        assert metric(server, "tbe_ids_outside_total", table="user") == 0
        bags = bags_of(np.random.default_rng(7), 3)
        assert_right(lookup_async(server.grpc, bags, 60), module, bags)


@pytest.mark.parametrize("specs", BOTH)
def test_over_hosts(specs: Several[Spec], tmp_path: Path) -> None:
    """The router remaps before it splits: hosts get rows of their shards, and have no map."""
    module = managed(specs)
    sharding = Sharding(
        ranks=2, ranks_per_host=1, types={"item": "row_wise", "word": "column_wise", "user": "data_parallel"}
    )
    router = export_hosts(tmp_path, module, ExportConfig(dtype=FP32.dtype, sharding=sharding))
    assert open_bundle(router).manifest.format_version == 7
    for each in open_bundle(router).manifest.hosts:
        part = open_bundle(router.parents[1] / each.model / str(each.version)).manifest
        assert part.format_version == 5
        assert IDS not in part.files
        assert all(table.id_map is None for table in part.tables)
    assert tbe_export("verify", str(router)).exit_code == 0
    with (
        fleet(tmp_path, router) as served,
        LookupClient(served.router.grpc, MODEL, 60) as client,
    ):
        check_served(client.lookup, module)
        check_rows(client.rows, module)
        with Engine.open(served.bundle, served.hosts) as engine:
            bags = bags_of(np.random.default_rng(7), 5)
            assert_right(engine.lookup(bags), module, bags)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return export_model(managed(), tmp_path / "r", "m", FP32)


def test_a_map_of_another_size_is_refused(bundle: Path) -> None:
    size = (bundle / IDS).stat().st_size
    for wrong in (size - 1, size + 1, 0):
        os.truncate(bundle / IDS, wrong)
        with pytest.raises(BundleError, match=rf"ids\.bin: expected {size} bytes, got {wrong}: publish"):
            Engine.open(bundle)
    (bundle / IDS).unlink()
    with pytest.raises(BundleError, match=r"ids\.bin: cannot be read"):
        Engine.open(bundle)


def test_a_map_with_other_bytes_is_found_by_its_digest(bundle: Path) -> None:
    _write(bundle / IDS, 8, [(bundle / IDS).read_bytes()[8] ^ 1])
    with pytest.raises(BundleError, match=r"ids\.bin: expected SHA-256"):
        verify_digests(open_bundle(bundle))
    assert tbe_export("verify", str(bundle)).exit_code == 1


def test_a_map_with_rows_that_are_not_there_never_reaches_fbgemm(bundle: Path) -> None:
    engine = Engine.open(bundle)
    for table in engine.bundle.manifest.tables:
        assert table.id_map is not None
        rows = np.fromfile(bundle / IDS, "<i8", 2 * table.id_map.capacity, offset=table.id_map.entries_offset)
        rows[1::2] = table.rows
        _write(bundle / IDS, table.id_map.entries_offset, rows.tobytes())
    with pytest.raises(InternalError, match=r"ids\.bin: expected rows of its tables, got others"):
        engine.lookup({"user_id": [[0, 1_000_003**2]], "words": [list(range(50))], "item_id": [[-1]]})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        pytest.param("known", 10**6, "no more known ids than entries", id="more known than entries"),
        pytest.param("capacity", 0, "expected up to", id="no entries"),
        pytest.param("capacity", 10**6, "are outside of it", id="more entries than bytes"),
        pytest.param("buckets", 2**33, "expected up to", id="too many buckets"),
        pytest.param("seeds_offset", -128, "are outside of it", id="before the file"),
        pytest.param("seeds_offset", 1, "expected them at a multiple of 128 bytes", id="not aligned"),
        pytest.param("entries_offset", 0, "expected bytes of their own", id="over others"),
        pytest.param("hashed", None, "expected a map, or no such key, got null", id="null"),
        pytest.param("hashed", {"bounds": [0, 30, 30, 60]}, "expected bounds that rise from 0 to 60", id="empty bucket"),
        pytest.param("hashed", {"bounds": [0, 59]}, "expected bounds that rise from 0 to 60", id="too few rows"),
    ],
)  # fmt: skip
def test_a_map_that_contradicts_itself_is_refused(bundle: Path, key: str, value: Any, message: str) -> None:
    _edit(bundle, lambda manifest: manifest["tables"][1]["id_map"].__setitem__(key, value))
    with pytest.raises(BundleError, match=f"table 'item'.*{message}"):
        open_bundle(bundle)


def test_a_manifest_that_has_no_maps_is_not_given_one(bundle: Path) -> None:
    _edit(bundle, lambda manifest: manifest.__setitem__("format_version", 6))
    with pytest.raises(BundleError, match="format_version 6 has no key `id_map`"):
        open_bundle(bundle)
    _edit(bundle, lambda manifest: manifest.__setitem__("format_version", 7))
    _edit(bundle, lambda manifest: manifest["tables"][0].__setitem__("id_policy", "zero"))
    with pytest.raises(BundleError, match="expected id_policy `error` with an id_map"):
        open_bundle(bundle)


def test_a_bundle_without_maps_may_not_have_the_file(tmp_path: Path) -> None:
    bundle = export_model(collection(), tmp_path / "r", "m")
    assert open_bundle(bundle).manifest.format_version == 4
    (bundle / IDS).write_bytes(b"12345678")
    digest = digest_file(bundle / IDS)
    _edit(bundle, lambda m: m["files"].__setitem__(IDS, {"size_bytes": 8, "sha256": digest.sha256}))
    with pytest.raises(BundleError, match=r"got another 'ids\.bin'"):
        open_bundle(bundle)


def _edit(bundle: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def _write(path: Path, offset: int, content: Several[int] | bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(content))
