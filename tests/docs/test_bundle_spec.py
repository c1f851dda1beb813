"""docs/bundle.md is enough to write a reader from: here is one, in numpy, that answers as the engine does.

`Reader` is written from that page alone. It shares no code with `serving` or `export`. A reader of bundles on several
hosts is in test_hosts_spec.py.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from serving.bundle import DefaultRow
from serving.bundle.plan import IdDtype
from serving.client import JaggedRows
from serving.engine import Engine
from tests.support import candidate_model
from tests.support.bundle_reader import DTYPES, POOLINGS, Bags, Reader
from tests.support.history_model import random_histories, with_histories
from tests.support.long_cases import one_in
from tests.support.managed_collision import bags_of, collection_behind, dealt, mch, trained, zch
from tests.support.ranker import ranker
from tests.support.scored_models import EXACT
from tests.support.sequence_models import Mixed


def collection(*, weighted: bool = False) -> EmbeddingBagCollection:
    """A table for each dtype and pooling (SUM alone for weighted ones); `shared` is read by two of them."""
    torch.manual_seed(5)
    tables = [
        EmbeddingBagConfig(
            name=f"{dtype}_{pooling}",
            num_embeddings=40 + 3 * index,
            embedding_dim=16 + 16 * (index % 3),
            feature_names=[f"key {dtype} {pooling} é", *(["shared"] if dtype in ("INT8", "FP16") else [])],
            pooling=PoolingType[pooling],
        )
        for index, (dtype, pooling) in enumerate(
            (dtype, pooling) for dtype in DTYPES for pooling in (["SUM"] if weighted else POOLINGS)
        )
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


class WithSequences(nn.Module):
    """The collection, beside one whose tables are not pooled; `shared` is read by tables of both."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = collection()
        self.rows = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=f"{dtype}_NONE",
                    num_embeddings=40 + index,
                    embedding_dim=16,
                    feature_names=[f"rows {dtype}", *(["shared"] if dtype == "INT8" else [])],
                )
                for index, dtype in enumerate(DTYPES)
            ]
        )


def positioned() -> FeatureProcessedEmbeddingBagCollection:
    """The weighted collection, behind position weights of some keys."""
    bags = collection(weighted=True)
    keys = [key for config in bags.embedding_bag_configs() for key in config.feature_names]
    processors = PositionWeightedModuleCollection({key: 13 for key in keys if "INT8" not in key})
    for weights in processors.parameters():
        weights.data.normal_()
    return FeatureProcessedEmbeddingBagCollection(bags, processors)


MIXED = {"*": "row_wise", "INT*_SUM": "column_wise", "FP16*": "data_parallel"}


def some_request(reader: Reader) -> tuple[dict[str, Bags], dict[str, list[Any]], dict[str, tuple[Any, Any, Any]]]:
    """Four bags of each key, in another order than the manifest's, with ids outside where a policy takes them.

    Returns:
        Ids and weights, as readers take them; and both as an engine takes them.
    """
    random = np.random.default_rng(3)
    request: dict[str, Bags] = {}
    for key, features in list(reader.keys.items())[::-1]:
        rows = min(reader.tables[feature["table"]]["rows"] for feature in features)
        bags = [random.integers(0, rows, size).tolist() for size in (4, 0, 1, 9)]
        if reader.tables[features[0]["table"]]["id_policy"] != "error":
            bags[0] += [-1, 10**9, -(2**63), 2**63 - 1]
        request[key] = bags
    weights = {key: [random.uniform(-1, 1, len(bag)) for bag in bags] for key, bags in request.items()}
    jagged = {
        key: (
            np.concatenate([np.array(bag, np.int64) for bag in bags]),
            np.array([len(bag) for bag in bags]),
            np.concatenate(weights[key]),
        )
        for key, bags in request.items()
    }
    return request, weights, jagged


@pytest.mark.parametrize(
    ("types", "output_dtype", "weighted"),
    [
        pytest.param({"*": "table_wise"}, "FP32", False, id="table_wise"),
        pytest.param({"*": "row_wise"}, "FP32", False, id="row_wise"),
        pytest.param({"*": "column_wise"}, "FP32", False, id="column_wise"),
        pytest.param({"*": "grid_shard"}, "FP32", False, id="grid_shard"),
        pytest.param({"*": "data_parallel"}, "FP32", False, id="data_parallel"),
        pytest.param(MIXED, "FP32", False, id="mixed"),
        pytest.param(MIXED, "FP16", False, id="mixed, FP16 out"),
        pytest.param(MIXED, "FP32", True, id="mixed, weighted"),
        pytest.param(MIXED, "FP32", None, id="mixed, position weights"),
        pytest.param({"*": "table_wise"}, "FP32", "sequences", id="table_wise, sequences"),
        pytest.param(MIXED, "FP16", "sequences", id="mixed, FP16 out, sequences"),
    ],
)
def test_an_independent_reader_agrees_with_the_engine(
    types: dict[str, str], output_dtype: str, weighted: bool | str | None, tmp_path: Path
) -> None:
    config = ExportConfig(
        dtype={f"{dtype}_*": WeightDtype[dtype] for dtype in DTYPES},
        id_policy={"INT4_*": IdPolicy.ZERO, "INT2_*": IdPolicy.MODULO, "FP32_*": DefaultRow(default_row=7)},
        output_dtype=OutputDtype(output_dtype),
        sharding=Sharding(ranks=4, ranks_per_host=2, types=types),
    )
    if weighted == "sequences":
        module: nn.Module = WithSequences()
        weighted = False
    else:
        module = positioned() if weighted is None else collection(weighted=bool(weighted))
    bundle = export_model(module, tmp_path / "repository", "all", config)
    reader = Reader(bundle)

    request, weights, jagged = some_request(reader)
    answered = reader.lookup(request, weights if weighted else None)
    expected = Engine.open(bundle).lookup(jagged if weighted else request)
    assert answered.keys() == expected.keys()
    rounding = 1e-6 if output_dtype == "FP32" else 2e-3
    for name, value in expected.items():
        answer = value.values if isinstance(value, JaggedRows) else value
        assert answer.dtype == answered[name].dtype
        np.testing.assert_allclose(answered[name], answer, rtol=rounding, atol=rounding, err_msg=name)

    said = re.search(
        r'"schema_digest"\s+value \{\s+string_value: "(\w+)"', (bundle.parent / "config.pbtxt").read_text()
    )
    assert said is not None
    assert said[1] == reader.digest("schema_digest")


@pytest.mark.parametrize("divided", [False, True])
def test_raw_ids_read_the_rows_that_the_specification_says(divided: bool, tmp_path: Path) -> None:
    modules = {
        "user": mch(48),
        "item": zch(60, 3, max_probe=16, inference_dispatch_div_train_world_size=divided),
        "word": zch(64),
    }
    bundle = export_model(trained(collection_behind(modules)), tmp_path / "repository", "raw")
    reader = Reader(bundle)
    assert "id_maps" in reader.manifest["requires"]
    request = bags_of(np.random.default_rng(0), 30)
    expected = Engine.open(bundle).lookup(request)
    for name, answer in reader.lookup(request).items():
        np.testing.assert_allclose(answer, expected[name], rtol=1e-6, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("divided", [False, True])
def test_an_independent_reader_maps_raw_ids_by_input_hash_size(divided: bool, tmp_path: Path) -> None:
    module = dealt(buckets=3, size=100, divided=divided)
    bundle = export_model(module, tmp_path / "repository", "raw")
    reader = Reader(bundle)
    assert "input_hash_size" in reader.manifest["requires"]
    request: dict[str, Bags] = {"x": [[id_] for id_ in range(102)], "y": [[]] * 102}
    expected = Engine.open(bundle).lookup(request)
    for name, answer in reader.lookup(request).items():
        np.testing.assert_allclose(answer, expected[name], rtol=1e-6, atol=1e-5, err_msg=name)
    with pytest.raises(AssertionError):
        reader.lookup({"x": [[102]]})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("output_dtype", one_in(2, ["FP16", "FP32"]))
def test_an_independent_reader_scores_like_the_engine(output_dtype: str, tmp_path: Path) -> None:
    config = ExportConfig(
        dtype={"*": WeightDtype.INT4},
        output_dtype=OutputDtype(output_dtype),
        id_dtype=IdDtype.INT32,
        sharding=Sharding(ranks=2, types={"a": "row_wise", "b": "column_wise"}),
        scores=True,
    )
    bundle = export_model(ranker(), tmp_path / "repository", "all", config)
    reader = Reader(bundle)
    assert "dense_part" in reader.manifest["requires"]
    request: dict[str, Bags] = {"z": [[1], [], [9, 9]], "x": [[3, 4], [5], []], "y": [[], [49], [0]]}
    dense: dict[str, list[list[float]]] = {
        "item": [[1, 0], [0, 1], [2, 2]],
        "user": [[0.5, 1, 2], [3, 4, 5], [-1, 0, 0]],
    }
    with torch.no_grad():
        scores = reader.score(request, dense)
    expected = Engine.open(bundle).score(request, dense)
    assert list(scores) == list(expected)
    rounding = 1e-3 if output_dtype == "FP16" else 1e-5
    for name, answer in expected.items():
        np.testing.assert_allclose(scores[name], np.float32(answer), rtol=rounding, atol=rounding)

    text = (bundle.parent / "config.pbtxt").read_text()
    assert reader.digest("schema_digest") in text
    for dense_input in reader.manifest["dense_part"]["inputs"]:  # [9]
        said = rf'name: "{dense_input["name"]}"\s+data_type: TYPE_FP32\s+dims: -1\s+dims: {dense_input["shape"][0]}\s+.*\s+optional: true'
        assert re.search(said, text)
    assert re.search(r'name: "like"\s+data_type: TYPE_FP32\s+dims: -1\s+\}', text)
    assert re.search(r'name: "both"\s+data_type: TYPE_FP32\s+dims: -1\s+dims: 2\s+\}', text)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("output_dtype", one_in(2, [OutputDtype.FP16, OutputDtype.FP32]))
def test_an_independent_reader_scores_sequences(output_dtype: OutputDtype, tmp_path: Path) -> None:
    bundle = export_model(Mixed(), tmp_path / "r", "m", ExportConfig(output_dtype=output_dtype))
    reader = Reader(with_histories(bundle, fixed_lengths={"seen": 2}))
    bags, dense = random_histories(np.random.default_rng(0), 5)
    bags["seen"] = [[1, 2]] * 5
    with torch.no_grad():
        scores = reader.score(bags, dense)
    for name, answer in Engine.open(bundle).score(bags, dense).items():
        np.testing.assert_allclose(scores[name], answer, rtol=2e-3, atol=2e-3)
    assert reader.digest("schema_digest") in (bundle.parent / "config.pbtxt").read_text()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_independent_reader_scores_with_per_id_numbers(tmp_path: Path) -> None:
    bundle = export_model(candidate_model.MODULE, tmp_path / "r", "m", EXACT, example=candidate_model.example())
    reader = Reader(bundle)
    for samples in (1, 5):
        bags, dense = candidate_model.ask(np.random.default_rng(samples), samples)
        flat = {
            name: rows if name == "session.now" else [row for bag in rows for row in bag]
            for name, rows in dense.items()
        }
        flat["session.paid"] = np.reshape(flat["session.paid"], (-1, 2))
        with torch.no_grad():
            scores = reader.score(bags, flat)
        candidate_model.assert_right(scores, candidate_model.expected(bags, dense))
    config = (bundle.parent / "config.pbtxt").read_text()
    assert reader.digest("schema_digest") in config
    names = [
        "session.times",
        "session.paid",
        *(output["name"] for output in reader.manifest["dense_part"]["outputs"][1:]),
    ]
    for key, value in (("by_id", ",".join(names)), ("by_id_keys", "seen,seen,target,seen")):  # [9]
        assert re.search(rf'key: "{key}"\s+value \{{\s+string_value: "{value}"', config)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("ranks", one_in(2, [2, 1]))
def test_a_program_is_called_as_the_specification_says(ranks: int, tmp_path: Path) -> None:
    """Section 6: `placement_digest`, `weights_host` and `forward`, by torch alone."""
    config = ExportConfig(sharding=Sharding(ranks=ranks, types={"*": "row_wise"}))
    bundle = export_model(collection(), tmp_path / "repository", "all", config)
    reader = Reader(bundle)
    program = torch.jit.load(bundle / "program.pt")  # type: ignore[no-untyped-call]
    assert program.placement_digest == reader.digest("placement_digest")
    program.weights_host = [
        torch.frombuffer(bytearray(reader.files[rank["weights"]]), dtype=torch.uint8) for rank in reader.plan["ranks"]
    ]
    names = [feature["name"] for feature in reader.manifest["features"]]
    bags: list[list[int]] = [[1, 2, 3], [], [4], [5, 5]]
    lookup = {reader.manifest["features"][index]["name"]: bags for index in (3, 0)}
    offsets = np.cumsum([0, *(len(bag) for column in lookup.values() for bag in column)])
    ids = [id_ for column in lookup.values() for bag in column for id_ in bag]
    answer = program.forward(
        torch.tensor(ids), torch.from_numpy(offsets), None, torch.tensor([names.index(name) for name in lookup])
    )
    tables = {feature["name"]: reader.tables[feature["table"]] for feature in reader.manifest["features"]}
    expected = [[reader.pool(tables[name], bag, None) for bag in column] for name, column in lookup.items()]
    np.testing.assert_allclose(answer.numpy(), np.concatenate(expected, axis=1), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_position_weights_are_written_for_digests_as_specified(tmp_path: Path) -> None:
    """Section 7: with and without exponents, and on both sides of where they begin."""
    module = positioned()
    numbers = [0.0, 1.0, -0.5, 9.9e-6, 1e-5, 1.5e-5, -3e-7, 1.2e-11, 9.9e15, 1.5e16, -1e16, 2.5e20, 1e30]
    for weights in module.parameters():
        if weights.shape == (len(numbers),):
            weights.data.copy_(torch.tensor(numbers))
    bundle = export_model(module, tmp_path / "repository", "all")
    reader = Reader(bundle)
    by_position = {tuple(feature.get("position_weights", ())) for feature in reader.manifest["features"]}
    assert tuple(torch.tensor(numbers).tolist()) in by_position
    program = torch.jit.load(bundle / "program.pt")  # type: ignore[no-untyped-call]
    assert program.placement_digest == reader.digest("placement_digest")
