"""docs/bundle.md is enough to write a reader from: here is one, in numpy, that answers as the engine does.

`Reader` is written from that page alone. It shares no code with `serving` or `export`. A reader of bundles on several
hosts is in test_hosts_spec.py.
"""

import hashlib
import io
import json
import re
from collections import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from serving.bundle import DefaultRow
from serving.bundle.hosts import IdDtype
from serving.client import Sequence
from serving.engine import Engine
from tests.support.managed import bags_of, behind, mch, trained, zch
from tests.support.ranker import ranker

Bags = abc.Sequence[abc.Sequence[int]]
BITS = {"FP32": 32, "FP16": 16, "INT8": 8, "INT4": 4, "INT2": 2}
DTYPES = list(BITS)
POOLINGS = ["SUM", "MEAN"]
FLOATS = {"FP32": "<f4", "FP16": "<f2"}


WORD = 2**64 - 1


def finished(h: int) -> int:
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & WORD
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return h ^ h >> 33


def murmur(x: int) -> int:
    def rotl(number: int, bits: int) -> int:
        return (number << bits | number >> 64 - bits) & WORD

    a = rotl(x * 0x87C37B91114253D5 & WORD, 31) * 0x4CF5AD432745937F & WORD
    a = rotl(a, 27) * 5 + 0x52DCE729 & WORD
    c = (a * 5 + 0x38495AB5 & WORD) ^ 16
    a = (a ^ 16) + c & WORD
    c = c + a & WORD
    a, c = finished(a), finished(c)
    a = a + c & WORD
    return a ^ (c + a & WORD)


class Reader:
    """The pooled embeddings of a bundle. The numbers in brackets are sections of docs/bundle.md."""

    def __init__(self, bundle: Path) -> None:
        text = (bundle / "manifest.json").read_bytes()
        self.manifest = json.loads(text)
        assert self.manifest["format_version"] in (3, 4, 5, 6, 7)  # [2]
        self.plan = self.manifest["plan"]
        self.tables = {table["name"]: table for table in self.manifest["tables"]}
        self.files = {}
        for name, digest in self.manifest["files"].items():  # [7]
            content = (bundle / name).read_bytes()
            assert len(content) == digest["size_bytes"]
            assert hashlib.sha256(content).hexdigest() == digest["sha256"]
            self.files[name] = content

    @property
    def keys(self) -> dict[str, list[Any]]:
        """The features of each key [2]."""
        found: dict[str, list[Any]] = {}
        for feature in self.manifest["features"]:
            found.setdefault(feature.get("shared_key", feature["name"]), []).append(feature)
        return found

    def digest(self, name: str) -> str:
        """`contract` or `layout` of the manifest [7]."""
        features, tables = self.manifest["features"], self.tables
        shared = [
            [feature.get("shared_key"), "sequence"]
            if tables[feature["table"]]["pooling"] == "NONE"
            else [feature["shared_key"]]
            if "shared_key" in feature
            else []
            for feature in features
        ]
        of_table = [
            [tables[each["table"]]["dim"], tables[each["table"]]["weighted"] and "position_weights" not in each]
            for each in features
        ]
        contract = [
            [[each["name"], *of, *key] for each, of, key in zip(features, of_table, shared, strict=True)],
            self.manifest["output_dtype"],
            *(["INT32"] if self.manifest.get("id_dtype") == "INT32" else []),
            *([self.names_of_scores] if self.manifest.get("dense_part") else []),
        ]
        layout = [self.manifest[key] for key in ("features", "tables", "plan", "output_dtype")]
        said = {"contract": contract, "layout": layout}[name]
        text = json.dumps(said, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def names_of_scores(self) -> list[Any]:
        """What a client sees of the dense part [7]."""
        part = self.manifest["dense_part"]
        inputs = [[each["name"], each["width"]] for each in part["inputs"]]
        return [inputs, [[each["name"], each["shape"]] for each in part["outputs"]]]

    def score(self, request: Mapping[str, Bags], dense: Mapping[str, Any]) -> dict[str, Any]:
        """{output: [B, …]} for {key: bags} of all keys, and {dense input: [B, width]} [6]."""
        part = self.manifest["dense_part"]
        pooled = self.lookup({key: request[key] for key in self.keys})
        every = np.concatenate([pooled[feature["name"]] for feature in self.manifest["features"]], axis=1)
        inputs = [np.asarray(dense[each["name"]], np.float32) for each in part["inputs"]]
        assert [each.shape for each in inputs] == [(len(every), each["width"]) for each in part["inputs"]]
        program = torch.jit.load(io.BytesIO(self.files["scores.pt"]))  # type: ignore[no-untyped-call]
        found = program.forward(*map(torch.from_numpy, (every, *inputs)))
        for each, numbers in zip(part["outputs"], found, strict=True):
            assert list(numbers.shape) == [len(every), *each["shape"]]
        return {each["name"]: numbers.numpy() for each, numbers in zip(part["outputs"], found, strict=True)}

    def lookup(self, request: Mapping[str, Bags], weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """{feature: [B, dim], of a sequence [n, dim]} for {key: bags} [5]."""
        bags_of = {
            feature["name"]: [[id_] for bag in request[key] for id_ in bag]
            for key in request
            for feature in self.keys[key]
            if self.tables[feature["table"]]["pooling"] == "NONE"
        }
        return {
            feature["name"]: np.stack(
                [
                    self.pool(
                        self.tables[feature["table"]],
                        bag,
                        self.weights_of(feature, bag, weights[key][sample] if weights else None),
                    )
                    for sample, bag in enumerate(bags)
                ]
            )
            for key, bags in request.items()
            for feature in self.keys[key]
            if feature["name"] not in bags_of
        } | {
            name: np.stack([self.pool(self.table_of(name), bag, None) for bag in bags])
            for name, bags in bags_of.items()
        }

    def table_of(self, name: str) -> Any:
        """The table of a feature."""
        return next(self.tables[each["table"]] for each in self.manifest["features"] if each["name"] == name)

    def weights_of(self, feature: Any, bag: Bags | Any, sent: Any) -> Any:
        """The weights of a bag for one feature, where a request sends some or none [5]."""
        by_position = feature.get("position_weights")
        if by_position is None:
            return sent
        assert not by_position or len(bag) <= len(by_position)
        return by_position[: len(bag)] if by_position else [1.0] * len(bag)

    def pool(self, table: Any, bag: abc.Sequence[int], weights: abc.Sequence[float] | None) -> npt.NDArray[Any]:
        """One bag [5]."""
        if "id_map" in table:
            bag = [self.row_of(table, id_) for id_ in bag]
        policy = table["id_policy"]
        if policy == "modulo":
            bag = [id_ % table["rows"] for id_ in bag]
        counted = [1.0] * len(bag) if weights is None or not table["weighted"] else weights
        ids = [(id_, weight) for id_, weight in zip(bag, counted, strict=True) if 0 <= id_ < table["rows"]]
        if isinstance(policy, dict):
            inside = [id_ if 0 <= id_ < table["rows"] else policy["default_row"] for id_ in bag]
            ids = list(zip(inside, counted, strict=True))
        assert policy != "error" or len(ids) == len(bag)
        answer = np.zeros(table["dim"], np.float32)
        for id_, weight in ids:
            answer += self.row(table, id_) * np.float32(weight)
        if table["pooling"] == "MEAN" and ids:
            answer /= np.float32(len(ids))
        return answer.astype(FLOATS[self.manifest["output_dtype"]])

    def row_of(self, table: Any, id_: int) -> int:
        """The row that a raw id reads [5, maps of ids]."""
        map_, content = table["id_map"], self.files["ids.bin"]
        h = (id_ & WORD) * 0xFF51AFD7ED558CCD & WORD
        h = (h ^ h >> 32) * 0xC4CEB9FE1A85EC53 & WORD
        seed = content[map_["seeds_offset"] + ((h >> 32) * map_["buckets"] >> 32)]
        m = (h ^ seed * 0x9E3779B97F4A7C15 & WORD) * 0xD6E8FEB86659FD93 & WORD
        at = map_["entries_offset"] + 16 * ((m >> 32) * map_["capacity"] >> 32)
        found, row = (int.from_bytes(content[place : place + 8], "little", signed=True) for place in (at, at + 8))
        if found == id_ and row >= 0:
            return row
        if "hashed" not in map_:
            return int(table["rows"]) - 1
        bounds = map_["hashed"]["bounds"]
        buckets = len(bounds) - 1
        b = id_ % buckets
        x = id_ // buckets if map_["hashed"].get("divided", False) else id_
        return int(bounds[b] + murmur(x & WORD) % (bounds[b + 1] - bounds[b]))

    def row(self, table: Any, id_: int) -> npt.NDArray[np.float32]:
        """One row of a table, put together from its blocks of columns [4]; of copies, the last one answers."""
        row = np.full(table["dim"], np.nan, np.float32)
        for shard in self.plan["shards"]:
            (top, bottom), (left, right) = shard["rows"], shard["columns"]
            if shard["table"] == table["name"] and top <= id_ < bottom:
                row[left:right] = self.stored(table["dtype"], shard, id_ - top, right - left)
        return row

    def stored(self, dtype: str, shard: Any, number: int, width: int) -> npt.NDArray[np.float32]:
        """Row `number` of a shard [3]."""
        header = 4 if dtype.startswith("INT") else 0
        size = header + width * BITS[dtype] // 8
        start = shard["offset_bytes"] + number * size
        stored = self.files[self.plan["ranks"][shard["rank"]]["weights"]][start : start + size]
        if not header:
            return np.frombuffer(stored, FLOATS[dtype]).astype(np.float32)
        scale, bias = np.frombuffer(stored[:4], "<f2").astype(np.float32)
        bits = BITS[dtype]
        codes = [stored[4 + j * bits // 8] >> (j * bits % 8) & (2**bits - 1) for j in range(width)]
        numbers: npt.NDArray[np.float32] = np.array(codes, np.float32) * scale + bias
        return numbers


def collection(*, weighted: bool = False) -> EmbeddingBagCollection:
    """A table for each dtype and pooling (SUM alone for weighted ones); `shared` is read by two of them."""
    torch.manual_seed(5)
    tables = [
        EmbeddingBagConfig(
            name=f"{dtype}_{pooling}",
            num_embeddings=40 + 3 * place,
            embedding_dim=16 + 16 * (place % 3),
            feature_names=[f"key {dtype} {pooling} é", *(["shared"] if dtype in ("INT8", "FP16") else [])],
            pooling=PoolingType[pooling],
        )
        for place, (dtype, pooling) in enumerate(
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
                    num_embeddings=40 + place,
                    embedding_dim=16,
                    feature_names=[f"rows {dtype}", *(["shared"] if dtype == "INT8" else [])],
                )
                for place, dtype in enumerate(DTYPES)
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
        rows = min(reader.tables[each["table"]]["rows"] for each in features)
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
def test_a_reader_written_from_the_specification_answers_as_the_engine(
    types: dict[str, str], output_dtype: str, weighted: bool | str | None, tmp_path: Path
) -> None:
    config = ExportConfig(
        dtype={f"{dtype}_*": WeightDtype(dtype) for dtype in DTYPES},
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
    found = reader.lookup(request, weights if weighted else None)
    expected = Engine.open(bundle).lookup(jagged if weighted else request)
    assert found.keys() == expected.keys()
    rounding = 1e-6 if output_dtype == "FP32" else 2e-3
    for name, each in expected.items():
        answer = each.values if isinstance(each, Sequence) else each
        assert answer.dtype == found[name].dtype
        np.testing.assert_allclose(found[name], answer, rtol=rounding, atol=rounding, err_msg=name)

    said = re.search(r'"contract"\s+value \{\s+string_value: "(\w+)"', (bundle.parent / "config.pbtxt").read_text())
    assert said is not None
    assert said[1] == reader.digest("contract")


@pytest.mark.parametrize("divided", [False, True])
def test_raw_ids_read_the_rows_that_the_specification_says(divided: bool, tmp_path: Path) -> None:
    modules = {
        "user": mch(48),
        "item": zch(60, 3, max_probe=16, inference_dispatch_div_train_world_size=divided),
        "word": zch(64),
    }
    bundle = export_model(trained(behind(modules)), tmp_path / "repository", "raw")
    reader = Reader(bundle)
    assert reader.manifest["format_version"] == 7
    request = bags_of(np.random.default_rng(0), 30)
    expected = Engine.open(bundle).lookup(request)
    for name, answer in reader.lookup(request).items():
        np.testing.assert_allclose(answer, expected[name], rtol=1e-6, atol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("output_dtype", ["FP32", "FP16"])
def test_a_reader_written_from_the_specification_scores_as_the_engine(output_dtype: str, tmp_path: Path) -> None:
    config = ExportConfig(
        dtype={"*": WeightDtype.INT4},
        output_dtype=OutputDtype(output_dtype),
        id_dtype=IdDtype.INT32,
        sharding=Sharding(ranks=2, types={"a": "row_wise", "b": "column_wise"}),
        scores=True,
    )
    bundle = export_model(ranker(), tmp_path / "repository", "all", config)
    reader = Reader(bundle)
    assert reader.manifest["format_version"] == 7
    request: dict[str, Bags] = {"z": [[1], [], [9, 9]], "x": [[3, 4], [5], []], "y": [[], [49], [0]]}
    dense: dict[str, list[list[float]]] = {
        "item": [[1, 0], [0, 1], [2, 2]],
        "user": [[0.5, 1, 2], [3, 4, 5], [-1, 0, 0]],
    }
    with torch.no_grad():
        found = reader.score(request, dense)
    expected = Engine.open(bundle).score(request, dense)
    assert list(found) == list(expected)
    rounding = 1e-3 if output_dtype == "FP16" else 1e-5
    for name, answer in expected.items():
        np.testing.assert_allclose(found[name], np.float32(answer), rtol=rounding, atol=rounding)

    text = (bundle.parent / "config.pbtxt").read_text()
    assert reader.digest("contract") in text
    for each in reader.manifest["dense_part"]["inputs"]:  # [9]
        said = (
            rf'name: "{each["name"]}"\s+data_type: TYPE_FP32\s+dims: -1\s+dims: {each["width"]}\s+.*\s+optional: true'
        )
        assert re.search(said, text)
    assert re.search(r'name: "like"\s+data_type: TYPE_FP32\s+dims: -1\s+\}', text)
    assert re.search(r'name: "both"\s+data_type: TYPE_FP32\s+dims: -1\s+dims: 2\s+\}', text)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_is_called_as_the_specification_says(ranks: int, tmp_path: Path) -> None:
    """Section 6: `layout`, `weights_host` and `forward`, by torch alone."""
    config = ExportConfig(sharding=Sharding(ranks=ranks, types={"*": "row_wise"}))
    bundle = export_model(collection(), tmp_path / "repository", "all", config)
    reader = Reader(bundle)
    program = torch.jit.load(bundle / "program.pt")  # type: ignore[no-untyped-call]
    assert program.layout == reader.digest("layout")
    program.weights_host = [
        torch.frombuffer(bytearray(reader.files[rank["weights"]]), dtype=torch.uint8) for rank in reader.plan["ranks"]
    ]
    names = [feature["name"] for feature in reader.manifest["features"]]
    bags: list[list[int]] = [[1, 2, 3], [], [4], [5, 5]]
    lookup = {reader.manifest["features"][place]["name"]: bags for place in (3, 0)}
    offsets = np.cumsum([0, *(len(bag) for column in lookup.values() for bag in column)])
    ids = [id_ for column in lookup.values() for bag in column for id_ in bag]
    answer = program.forward(
        torch.tensor(ids), torch.from_numpy(offsets), None, torch.tensor([names.index(name) for name in lookup])
    )
    tables = {each["name"]: reader.tables[each["table"]] for each in reader.manifest["features"]}
    expected = [[reader.pool(tables[name], bag, None) for bag in column] for name, column in lookup.items()]
    np.testing.assert_allclose(answer.numpy(), np.concatenate(expected, axis=1), rtol=1e-6, atol=1e-6)
