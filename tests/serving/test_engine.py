"""An engine answers as numpy does, from the bytes that were exported and from the float tables."""

import gc
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import KeyedJaggedTensor

from export import ExportConfig, IdPolicy, Sharding, WeightDtype, export_model
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import ConfigurationError, IdsOutside, InvalidRequest
from serving.requests.accept import accept
from serving.requests.encoding import encode
from tests.support import bundle_reader, oracle
from tests.support.leak_check import without_collector
from tests.support.long_cases import one_in
from tests.support.models import (
    MEAN,
    MIXED,
    SUM,
    Spec,
    collection,
    exported,
    flat,
    float_tables,
    random_bags,
    table_of,
)

pytestmark = pytest.mark.usefixtures("any_torchscript")


@pytest.fixture(scope="module")
def engine(mixed: Path, any_torchscript: None) -> Engine:  # noqa: ARG001
    return Engine.open(mixed)


@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(0, 20),
    longest=st.sampled_from([0, 1, 7, 60]),
    features=st.permutations(list(table_of(MIXED))).flatmap(lambda order: st.integers(1, 5).map(lambda n: order[:n])),
)
def test_answers_are_numpy_s_over_the_exported_bytes(
    engine: Engine, mixed: Path, seed: int, samples: int, longest: int, features: list[str]
) -> None:
    bags = random_bags(np.random.default_rng(seed), MIXED, samples, features, longest)
    answer = engine.lookup(bags)
    assert list(answer) == features
    for feature, rows in answer.items():
        spec = table_of(MIXED)[feature]
        assert rows.dtype == np.float32
        assert rows.shape == (samples, spec.dim)
        expected = oracle.pool(bundle_reader.exported_table(mixed, spec.name), bags[feature], spec.pooling)
        np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6 * (1 + longest))


@pytest.mark.parametrize("make", [pa.table, pl.DataFrame, pd.DataFrame], ids=["pyarrow", "polars", "pandas"])
def test_a_data_frame_is_answered_as_its_lists(engine: Engine, make: Any) -> None:
    bags = random_bags(np.random.default_rng(0), MIXED, 5, list(table_of(MIXED)), 3)
    frame = make({"day": ["mon"] * 5} | {name: [list(bag) for bag in lists] for name, lists in bags.items()})
    expected = engine.lookup(bags)
    answer = engine.lookup(frame)
    assert list(answer) == list(expected)
    for feature, rows in expected.items():
        np.testing.assert_array_equal(answer[feature], rows)
        assert answer.to_polars()[feature].to_list() == rows.tolist()
    with pytest.raises(InvalidRequest, match="features: expected a column for at least one of "):
        engine.lookup(make({"day": ["mon"]}))


def test_answers_are_within_the_quantization_bound_of_the_float_tables(engine: Engine) -> None:
    tables = float_tables(collection(MIXED))
    bags = random_bags(np.random.default_rng(1), MIXED, 200)
    dtypes = {table.name: table.dtype.value for table in engine.bundle.manifest.tables}
    for feature, rows in engine.lookup(bags).items():
        spec = table_of(MIXED)[feature]
        table = tables[spec.name]
        bound = oracle.row_range_bound(table, dtypes[spec.name])[:, np.newaxis].repeat(spec.dim, axis=1)
        error = np.abs(rows - oracle.pool(table, bags[feature], spec.pooling))
        assert (error <= oracle.pool(bound, bags[feature], spec.pooling) + 1e-5).all()
        if dtypes[spec.name] != "FP16":
            assert error.max() > 1e-3  # it is the quantized table that answers


@pytest.mark.parametrize("dtype", list(WeightDtype))
@pytest.mark.parametrize("specs", one_in(2, [pytest.param(SUM, id="SUM"), pytest.param(MEAN, id="MEAN")]))
def test_every_dtype_answers_with_one_pooling(tmp_path: Path, dtype: WeightDtype, specs: tuple[Spec, ...]) -> None:
    specs = tuple(Spec(spec.name, spec.rows, 16, spec.pooling, spec.features) for spec in specs)
    bundle = export_model(collection(specs), tmp_path / "r", "m", ExportConfig(dtype={"*": dtype}))
    bags = random_bags(np.random.default_rng(2), specs, 50)
    for feature, rows in Engine.open(bundle).lookup(bags).items():
        spec = table_of(specs)[feature]
        expected = oracle.pool(bundle_reader.exported_table(bundle, spec.name), bags[feature], spec.pooling)
        np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=5e-6)


class Both(nn.Module):
    """A weighted collection beside one that takes no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = collection((Spec("p", 20, 8, "SUM", ("q",)),))
        self.weighted = collection(MEAN, weighted=True)


@pytest.mark.parametrize("strange", [np.nan, np.inf])
@pytest.mark.parametrize("ranks", one_in(2, [2, 1]))
def test_a_nan_or_infinite_weight_affects_its_own_bag_only(tmp_path: Path, strange: float, ranks: int) -> None:
    """docs/protocol.md promises it."""
    config = ExportConfig(
        id_policy={"a": IdPolicy.ZERO}, sharding=Sharding(ranks=ranks, types={"*": "row_wise"} if ranks > 1 else {})
    )
    engine = Engine.open(export_model(Both(), tmp_path / "r", "m", config))

    def answer(weight: float) -> dict[str, np.ndarray[Any, Any]]:
        ids, lengths = [3, 40, 999, 5, 6], [2, 2, 1]
        return {
            **engine.lookup({"x": (ids, lengths, [1.0, weight, 1.0, 1.0, 1.0])}),
            **engine.lookup(
                {"y": (ids, lengths, [1.0, 1.0, weight, 1.0, 1.0]), "q": ([1, 2, 3], [1] * 3, [weight] * 3)}
            ),
        }

    affected, expected = answer(strange), answer(1.0)
    assert not np.isfinite(affected["x"][0]).any()
    np.testing.assert_array_equal(affected["x"][1:], expected["x"][1:])
    for name in ("y", "q"):  # an id that contributes nothing, and a table that takes no weights
        np.testing.assert_array_equal(affected[name], expected[name])


TORCH_DTYPES = {
    WeightDtype.FP32: torch.float32,
    WeightDtype.FP16: torch.float16,
    WeightDtype.INT8: torch.qint8,
    WeightDtype.INT4: torch.quint4x2,
    WeightDtype.INT2: torch.quint2x4,
}


@pytest.mark.parametrize("dtype", list(WeightDtype))
@pytest.mark.parametrize("sharding", one_in(3, ["row_wise", "column_wise", "table_wise"]))
def test_torchrec_s_own_quantized_module_answers_the_same(tmp_path: Path, dtype: WeightDtype, sharding: str) -> None:
    """Bit for bit where rows stay whole, means included: theirs come from two TBE calls, ours from one and a division."""
    from torchrec.inference.modules import quantize_inference_model

    module = collection(MIXED)
    ranks = 1 if sharding == "table_wise" else 3
    config = ExportConfig(dtype={"*": dtype}, sharding=Sharding(ranks=ranks, types={"*": sharding}))
    bundle = export_model(module, tmp_path / "r", "m", config)
    bags = random_bags(np.random.default_rng(3), MIXED, 64)
    values, lengths = flat(bags)
    kjt = KeyedJaggedTensor.from_lengths_sync(list(bags), torch.from_numpy(values), torch.from_numpy(lengths))
    dtypes = {spec.name: TORCH_DTYPES[dtype] for spec in MIXED}
    quantized = quantize_inference_model(torch.nn.Sequential(module), per_table_weight_dtype=dtypes)(kjt).to_dict()
    for feature, rows in Engine.open(bundle).lookup(kjt).items():
        expected = quantized[feature].numpy().astype(np.float32)
        if sharding == "row_wise":
            np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(rows, expected)


def test_arrays_with_gaps_are_read_as_they_are(repository: Path) -> None:
    """FBGEMM reads ids and weights one behind the other, whatever lies between those that were given."""
    engine = Engine.open(repository / "weighted" / "1")
    keys = [feature for spec in SUM for feature in spec.features]
    ids = torch.arange(4 * len(keys)) % 3
    lengths = torch.full((2 * len(keys),), 2, dtype=torch.int32)
    weights = torch.linspace(0.5, 2.0, len(ids))
    expected = engine.lookup(KeyedJaggedTensor(keys, ids, weights=weights, lengths=lengths))
    gaps = [torch.stack([tensor, tensor + 1], dim=1)[:, 0] for tensor in (ids, weights, lengths)]
    assert not any(gap.is_contiguous() for gap in gaps)
    answer = engine.lookup(KeyedJaggedTensor(keys, gaps[0], weights=gaps[1], lengths=gaps[2]))
    for feature, rows in expected.items():
        np.testing.assert_array_equal(answer[feature], rows)


@pytest.mark.parametrize("step", [2, -1], ids=["with_gaps", "backwards"])
@pytest.mark.parametrize("together", [1, 3])
def test_tensors_that_are_not_contiguous_are_read_correctly(engine: Engine, step: int, together: int) -> None:
    request = encode(random_bags(np.random.default_rng(3), MIXED, 4), engine.bundle.manifest.weighted_keys)

    def apart(array: Any) -> Any:
        spread = np.zeros(2 * array.size, array.dtype)[::step][: array.size]
        spread[:] = array
        assert not spread.flags.c_contiguous
        return spread

    odd = replace(request, values=apart(request.values), lengths=apart(request.lengths))
    expected = engine.outputs(request)[EMBEDDINGS]
    for outputs in engine.answer([accept(engine.schema, odd)] * together).outcomes():
        assert isinstance(outputs, Mapping)
        np.testing.assert_array_equal(outputs[EMBEDDINGS], expected)


def test_weights_multiply_rows(repository: Path) -> None:
    bundle = repository / "weighted" / "1"
    random = np.random.default_rng(4)
    bags = random_bags(random, SUM, 30)
    weights = {
        name: [random.normal(size=len(bag)).astype(np.float32) for bag in column] for name, column in bags.items()
    }
    request = {
        name: (
            np.concatenate([np.array(bag, np.int64) for bag in column]),
            np.array([len(bag) for bag in column]),
            np.concatenate(weights[name]),
        )
        for name, column in bags.items()
    }
    for feature, rows in Engine.open(bundle).lookup(request).items():
        spec = table_of(SUM)[feature]
        expected = oracle.pool(
            bundle_reader.exported_table(bundle, spec.name),
            bags[feature],
            "SUM",
            [bag_weights.tolist() for bag_weights in weights[feature]],
        )
        np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-5)


def test_fp16_answers_are_rounded_once(repository: Path) -> None:
    """A mean in FP16 is the FP32 mean rounded, not a rounded sum divided."""
    bundle = repository / "half" / "1"
    bags = random_bags(np.random.default_rng(5), MIXED, 100, longest=40)
    for feature, rows in Engine.open(bundle).lookup(bags).items():
        spec = table_of(MIXED)[feature]
        assert rows.dtype == np.float16
        expected = oracle.pool(bundle_reader.exported_table(bundle, spec.name), bags[feature], spec.pooling)
        np.testing.assert_allclose(rows, expected, rtol=2**-11 + 1e-5, atol=1e-5)


def test_policy_zero_drops_ids_outside_the_table(engine: Engine) -> None:
    with_bad = {"words": [[1, 1000, 2], [-1], [5, 2**40]]}
    without = {"words": [[1, 2], [], [5]]}
    np.testing.assert_array_equal(engine.lookup(with_bad)["words"], engine.lookup(without)["words"])


def test_a_bag_of_100_000_ids_is_answered(engine: Engine, mixed: Path) -> None:
    bags = {"user_id": [np.random.default_rng(6).integers(0, 500, 100_000).tolist(), [3]]}
    expected = oracle.pool(bundle_reader.exported_table(mixed, "user"), bags["user_id"], "SUM")
    np.testing.assert_allclose(engine.lookup(bags)["user_id"], expected, rtol=1e-3, atol=0.5)


@pytest.mark.promise("Concurrent threads on one program return the answers of a single thread")
def test_eight_threads_on_one_program_answer_as_one(engine: Engine) -> None:
    """They share the tensor that FBGEMM counts its warnings in (FBGEMM #3631)."""
    random = np.random.default_rng(5)
    requests = [random_bags(random, MIXED, int(random.integers(1, 30))) for _ in range(20)]
    expected = [engine.lookup(request) for request in requests]
    together = threading.Barrier(8)

    def ask(seed: int) -> int:
        together.wait()
        right = 0
        for number in np.random.default_rng(seed).integers(0, len(requests), 200):
            answer = engine.lookup(requests[number])
            right += all(np.array_equal(answer[name], rows) for name, rows in expected[number].items())
        return right

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [200] * 8


def test_ids_out_of_range_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"feature 'genres': expected an id in \[0, 20\), got 20"):
        engine.lookup({"genres": [[20]]})


def test_requests_of_a_group_fail_separately(engine: Engine) -> None:
    requests: list[dict[str, list[list[int]]]] = [
        {"genres": [[3], [20]]},
        {"genres": [[3, 5], []]},
        {"words": [[1, 1000]]},
        {"genres": [[-1]]},
    ]
    accepted = [accept(engine.schema, encode(request)) for request in requests]
    batch_answer = engine.answer(accepted)
    outcomes = batch_answer.outcomes()
    assert [type(outcome) for outcome in outcomes] == [IdsOutside, dict, dict, IdsOutside]
    assert list(batch_answer.positions) == [1, 2]
    assert batch_answer.ids_outside == {"word": 1}
    for number, outputs in zip(batch_answer.positions, batch_answer.outputs(), strict=True):
        assert outputs.keys() == {"embeddings"}
        (expected,) = engine.lookup(requests[number]).values()
        np.testing.assert_array_equal(outputs["embeddings"], expected)
    none = engine.answer([accepted[0], accepted[3]])
    assert [str(outcome) for outcome in none.outcomes()] == [str(outcomes[0]), str(outcomes[3])]
    assert none.outputs() == []


def test_a_refused_lookup_leaves_nothing_to_the_garbage_collector(engine: Engine) -> None:
    with without_collector():
        for _ in range(20):
            with suppress(InvalidRequest):
                engine.lookup({"genres": [[20]]})
        assert gc.collect() == 0


def test_opening_a_bundle_maps_its_weights_and_reads_none(tmp_path: Path) -> None:
    """A weights file that cannot be read twice is mapped: the engine's pages are the file's."""
    bundle = export_model(collection((Spec("t", 20_000, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    engine = Engine.open(bundle)
    maps = Path("/proc/self/smaps").read_text().split(str(bundle / "weights.0.bin"))
    assert len(maps) == 2
    fields = dict(line.split(":")[:2] for line in maps[1].splitlines()[1:15] if ":" in line)
    assert fields["Private_Dirty"].split() == ["0", "kB"]
    assert int(fields["Rss"].split()[0]) < 200
    engine.lookup({"x": [list(range(0, 20_000, 10))]})
    maps = Path("/proc/self/smaps").read_text().split(str(bundle / "weights.0.bin"))
    fields = dict(line.split(":")[:2] for line in maps[1].splitlines()[1:15] if ":" in line)
    assert int(fields["Rss"].split()[0]) > 1000


NO_ADDRESS_SPACE = """
import resource, sys
import torch
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from serving.tables.table_files import TableFiles
from serving.bundle import open_bundle
from serving.errors import BundleError

bundle = open_bundle(Path(sys.argv[1]))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))
try:
    TableFiles(bundle.path, bundle.manifest)
except BundleError as error:
    print(error)
"""


@pytest.mark.promise("A rank that does not fit into memory is refused by name, and the serving version continues")
def test_weights_that_cannot_be_mapped_are_refused_with_advice(tmp_path: Path) -> None:
    bundle = export_model(collection((Spec("t", 500_000, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    done = subprocess.run(
        [sys.executable, "-c", NO_ADDRESS_SPACE, str(bundle)], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{bundle / 'weights.0.bin'}: cannot be mapped: Cannot allocate memory: ")
    assert "ulimit -v" in line


def test_a_path_in_place_of_a_bundle_is_refused(tmp_path: Path) -> None:
    path: Any = exported(tmp_path)
    with pytest.raises(ConfigurationError, match=r"bundle: expected a Bundle, got .*: Engine\.open takes its path"):
        Engine(path)
