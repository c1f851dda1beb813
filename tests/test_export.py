"""From a trained module to a published bundle, and everything that stops on the way."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from export import ExportConfig, IdPolicy, WeightDtype, checkpoint, export_model, pipeline, store
from export.errors import ConfigError, ModelError, ParityError, PublishError, QuantizeError
from export.parity import check_parity
from export.program import compile_program, save_program
from export.quantize import quantize
from serving.bundle import open_bundle
from serving.engine import Engine
from tests.models import MIXED, MIXED_CONFIG, SUM, Spec, collection


def files(folder: Path) -> dict[str, bytes]:
    """Everything under `folder`, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("_answering_anew")
def test_export_publishes_a_whole_version_and_leaves_nothing_else(tmp_path: Path) -> None:
    bundle = export_model(collection(), tmp_path / "r", "m")
    assert bundle == tmp_path / "r" / "m" / "1"
    assert sorted(path.name for path in bundle.iterdir()) == [
        "manifest.json",
        "model.py",
        "program.pt",
        "weights.0.bin",
    ]
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["1", "config.pbtxt"]
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (bundle / "program.pt").stat().st_size < 100_000


@pytest.mark.usefixtures("_answering_anew")
def test_the_manifest_says_what_was_exported(tmp_path: Path) -> None:
    manifest = open_bundle(export_model(collection(MIXED), tmp_path / "r", "m", MIXED_CONFIG)).manifest
    assert [feature.name for feature in manifest.features] == [
        "user_id",
        "item_id",
        "recent_items",
        "genres",
        "words",
    ]
    assert [table.dtype.value for table in manifest.tables] == ["INT8", "INT4", "FP16", "INT2"]
    assert [table.id_policy for table in manifest.tables] == [IdPolicy.ERROR] * 3 + [IdPolicy.ZERO]
    assert manifest.versions.keys() >= {"torch", "torchrec", "fbgemm-gpu-cpu", "tbe-serving"}
    for parity in manifest.parity:
        assert 0 < parity.quantized.mean < parity.quantized.largest <= parity.limit
        assert 0.8 < parity.quantized.cosine < 1
        assert parity.sharded.largest < 1e-5
        assert parity.sharded.cosine == pytest.approx(1, abs=1e-9)
        assert parity.scripted.largest == parity.reloaded.largest == 0
        assert parity.scripted.cosine == parity.reloaded.cosine == 1


def test_rows_are_packed_at_alignment_1(tmp_path: Path) -> None:
    bundle = export_model(collection((Spec("t", 1000, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    assert (bundle / "weights.0.bin").stat().st_size == 1000 * 68


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_of_fbgemm_s_own_op(bits: int, dtype: torch.dtype) -> None:
    rows = torch.randn(1000, 16).to(dtype)
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    stored = quantize("t", 0, rows, WeightDtype(f"INT{bits}"))
    assert torch.equal(stored[:, 4:], fused[:, :-4])
    assert torch.equal(stored[:, :4], fused[:, -4:])


def test_versions_count_up_and_earlier_ones_stay_as_they_are(tmp_path: Path) -> None:
    first = export_model(collection(seed=1), tmp_path / "r", "m")
    before = files(tmp_path)
    second = export_model(collection(seed=2), tmp_path / "r", "m")
    ninth = export_model(collection(seed=3), tmp_path / "r", "m", version=9)
    assert export_model(collection(seed=4), tmp_path / "r", "m").name == "10"
    assert (first.name, second.name, ninth.name) == ("1", "2", "9")
    assert before.items() <= files(tmp_path).items()


def test_a_version_that_exists_is_never_replaced(tmp_path: Path) -> None:
    export_model(collection(seed=1), tmp_path / "r", "m")
    before = files(tmp_path)
    with pytest.raises(PublishError, match="m/1: exists; published versions are never changed"):
        export_model(collection(seed=2), tmp_path / "r", "m", version=1)
    assert files(tmp_path) == before


def test_a_version_that_appears_during_the_export_is_never_replaced(tmp_path: Path) -> None:
    export_model(collection(seed=1), tmp_path / "r", "m")

    def publish_the_same(progress: pipeline.Progress) -> None:
        if progress.step == "parity":
            export_model(collection(seed=2), tmp_path / "r", "m", version=2)

    with pytest.raises(PublishError, match="m/2: exists"):
        export_model(collection(seed=3), tmp_path / "r", "m", version=2, progress=publish_the_same)
    assert export_model(collection(seed=4), tmp_path / "r", "m", progress=lambda _: None).name == "3"


def test_two_first_versions_at_once_both_get_published(tmp_path: Path) -> None:
    published = []

    def publish_another(progress: pipeline.Progress) -> None:
        if progress.step == "parity":
            published.append(export_model(collection(seed=2), tmp_path / "r", "m").name)

    assert export_model(collection(seed=1), tmp_path / "r", "m", progress=publish_another).name == "2"
    assert published == ["1"]


def test_versions_of_a_model_share_a_contract(tmp_path: Path) -> None:
    export_model(collection(MIXED), tmp_path / "r", "m")
    before = files(tmp_path)
    with pytest.raises(PublishError, match=r"expected the contract .*publish under another name"):
        export_model(collection(SUM), tmp_path / "r", "m")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        pytest.param("../m", None, "name: expected at most 128 letters", id="path"),
        pytest.param(".m", None, "name: expected at most 128 letters", id="hidden"),
        pytest.param("", None, "name: expected at most 128 letters", id="empty"),
        pytest.param("m", 0, "version: expected 1 to 9223372036854775807, got 0", id="version 0"),
    ],
)
def test_names_and_versions_that_triton_would_not_take(
    tmp_path: Path, name: str, version: int | None, message: str
) -> None:
    with pytest.raises(PublishError, match=message):
        export_model(collection(), tmp_path / "r", name, version=version)
    assert files(tmp_path) == {}


def test_a_repository_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="cannot write in it and beside it: Not a directory"):
        export_model(collection(), tmp_path / "file" / "r", "m")


def test_the_root_of_a_file_system_is_no_repository() -> None:
    """Nothing can be renamed into it from beside it."""
    assert os.path.ismount("/dev/shm")

    def folders() -> list[str]:
        return [entry.name for entry in os.scandir("/dev/shm") if entry.is_dir()]  # servers have files there

    before = folders()
    with pytest.raises(
        PublishError, match=r"/dev/shm: (is the root of a file system|cannot write in it and beside it)"
    ):
        export_model(collection(), "/dev/shm", "m")
    assert folders() == before


EXPORT_SLOWLY = """
import signal, sys, time
from export import export_model
from tests.models import collection
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
def wait(progress):
    print(progress.step, flush=True)
    time.sleep(60 if progress.step == sys.argv[2] else 0)
export_model(collection(), sys.argv[1], "m", progress=wait)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("step", ["user", "parity"])
def test_a_stopped_export_publishes_nothing_and_the_next_one_clears_up(
    tmp_path: Path, number: signal.Signals, step: str
) -> None:
    export_model(collection(seed=1), tmp_path / "r", "m")
    before = files(tmp_path / "r")
    command = [sys.executable, "-c", EXPORT_SLOWLY, str(tmp_path / "r"), step]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as export:
        assert export.stdout is not None
        assert any(line.strip() == step for line in export.stdout)
        export.send_signal(number)
        export.wait()
    assert files(tmp_path / "r") == before
    assert export_model(collection(seed=2), tmp_path / "r", "m").name == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_exports_killed_at_50_random_moments_leave_whole_versions_or_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.killed_exports", str(tmp_path), "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drafts"] >= 10
    assert found["left"] == []


def test_a_living_export_s_draft_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXPORT_SLOWLY, str(tmp_path / "r"), "parity"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as export:
        assert export.stdout is not None
        assert any(line.strip() == "parity" for line in export.stdout)
        export_model(collection(), tmp_path / "r", "m")
        drafts = [path for path in tmp_path.iterdir() if path.name != "r"]
        export.kill()
    assert len(drafts) == 1
    assert (drafts[0] / "version" / "weights.0.bin").exists()


EXPORT_CHECKPOINT = """
import resource, sys
from export import export_model
from export.errors import PublishError
from tests.test_export import on_meta
def peak():  # what getrusage says would be the parent's, if that was larger
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
before = peak()
if len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    export_model(on_meta(), sys.argv[1], "m", checkpoint=sys.argv[2])
except PublishError as error:
    sys.exit(str(error))
print(peak() - before)
"""
LARGE = (Spec("t", 3_000_000, 64, "SUM", ("x",)),)


def on_meta() -> EmbeddingBagCollection:
    with torch.device("meta"):
        return collection(LARGE)


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 732 MiB."""
    path = tmp_path_factory.mktemp("large") / "w.pt"
    torch.save({"embedding_bags.t.weight": torch.linspace(-1, 1, 3_000_000 * 64).view(-1, 64)}, path)
    return path


def test_memory_does_not_grow_with_the_table(tmp_path: Path, large_checkpoint: Path) -> None:
    command = [sys.executable, "-c", EXPORT_CHECKPOINT, str(tmp_path / "r"), str(large_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 < int(done.stdout) / 1024 < 300  # MiB, of 732
    assert (tmp_path / "r" / "m" / "1" / "weights.0.bin").stat().st_size == 3_000_000 * 68


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, large_checkpoint: Path) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write in the same way."""
    command = [sys.executable, "-c", EXPORT_CHECKPOINT, str(tmp_path / "r"), str(large_checkpoint), str(50 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the draft cannot be written: File too large: make room beside the repository" in done.stderr
    assert files(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


# --- what is asked for


def test_the_last_matching_pattern_counts() -> None:
    config = ExportConfig(dtype={"*": WeightDtype.INT4, "us*": WeightDtype.FP16, "user": WeightDtype.FP32})
    assert config.dtype_of("user") is WeightDtype.FP32
    assert config.dtype_of("usual") is WeightDtype.FP16
    assert config.dtype_of("item") is WeightDtype.INT4
    assert ExportConfig().dtype_of("item") is None


def test_a_pattern_that_matches_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype 'itme': .* matches none of user, item, genre, word"):
        export_model(collection(), tmp_path / "r", "m", ExportConfig(dtype={"itme": WeightDtype.INT4}))


def test_a_dim_that_cannot_be_packed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    module = collection((Spec("odd", 10, 6, "SUM", ("x",)),))
    with pytest.raises(QuantizeError, match="table 'odd': expected a dim that is a multiple of 4 for INT4, got 6"):
        export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"*": WeightDtype.INT4}))
    assert files(tmp_path) == {}


# --- what was trained


class Deep(nn.Module):
    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(collection)
        self.dense = nn.Linear(2, 2)


def config(name: str, *features: str, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=list(features), **more)


def one_row(module: nn.Module, table: str, row: int) -> npt.NDArray[np.float32]:
    """A row of the one table whose key ends in `table`."""
    (key,) = [key for key in module.state_dict() if key.endswith(f"{table}.weight")]
    weights: npt.NDArray[np.float32] = module.state_dict()[key][row].numpy()
    return weights


def test_every_collection_of_a_module_is_served_under_names_that_differ(tmp_path: Path) -> None:
    """Nested, with a table and a feature of the same name in two of them, one of them fused, one weighted."""
    fused = FusedEmbeddingBagCollection(
        [config("same", "x")], torch.optim.SGD, {"lr": 0.1}, device=torch.device("cpu")
    )
    module = nn.ModuleDict(
        {
            "one": Deep(EmbeddingBagCollection(tables=[config("same", "x"), config("two", "x", "y")])),
            "fused": fused,
            "weighted": EmbeddingBagCollection(tables=[config("third", "z")], is_weighted=True),
        }
    )
    exact = ExportConfig(dtype={"*": WeightDtype.FP32, "fused.*": WeightDtype.FP16})
    answer = Engine.open(export_model(module, tmp_path / "r", "m", exact)).lookup(
        {
            "x": [[3]],
            "y": [[4]],
            "z": ([5, 6], [2], [0.5, -2.0]),
        }
    )
    assert list(answer) == ["x@one.inner.0.same", "x@two", "x@fused.same", "y", "z"]
    np.testing.assert_array_equal(answer["x@one.inner.0.same"][0], one_row(module["one"], "same", 3))
    np.testing.assert_array_equal(answer["x@two"][0], one_row(module, "two", 3))
    np.testing.assert_allclose(answer["x@fused.same"][0], one_row(fused, "same", 3), rtol=2**-10)
    np.testing.assert_array_equal(answer["y"][0], one_row(module, "two", 4))
    expected = 0.5 * one_row(module, "third", 5) - 2 * one_row(module, "third", 6)
    np.testing.assert_allclose(answer["z"][0], expected, rtol=1e-6)


def test_a_key_of_several_tables_is_sent_once_and_answered_as_torchrec_does(tmp_path: Path) -> None:
    """By the model's own KJT; the answers of a key are side by side."""
    ebc = EmbeddingBagCollection(tables=[config("a", "x", "y"), config("b", "z", "x")])
    exact = ExportConfig(dtype={"*": WeightDtype.FP32})
    engine = Engine.open(export_model(ebc, tmp_path / "r", "m", exact))
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["x", "y", "z"], torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([2, 0, 1, 1, 0, 2])
    )
    expected = ebc(kjt).to_dict()
    answer = engine.lookup(kjt)
    assert list(answer) == ["x@a", "x@b", "y", "z"]
    assert answer.keys() == expected.keys()
    for name, rows in answer.items():
        np.testing.assert_allclose(rows, expected[name].detach().numpy(), rtol=1e-6)
    alone = engine.lookup({"z": [[5, 6], []], "x": [[1, 2], []]})
    assert list(alone) == ["z", "x@a", "x@b"]
    np.testing.assert_array_equal(alone["x@b"][0], answer["x@b"][0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: nn.Linear(2, 2), "Linear: expected an EmbeddingBagCollection in it, found none", id="no tables"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x,y")]), "feature 'x,y': expected a name without a comma", id="comma"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x", "x")]), "feature 'x@a': expected different names, got 2 answers", id="a key twice"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "f", "f@b"), config("b", "f")]), "feature 'f@b': expected different names, got 2 answers", id="a name that is made"),
        pytest.param(lambda: EmbeddingBagCollection(tables=[config("a", "x", num_embeddings_post_pruning=5)]), "table 'a': .* pruned", id="pruned"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        export_model(build(), tmp_path / "r", "m")
    assert files(tmp_path) == {}


# --- rows that cannot be stored, and the gate


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        pytest.param(float("nan"), WeightDtype.INT8, "table 'user': row 321 holds NaN or infinity", id="NaN"),
        pytest.param(float("-inf"), WeightDtype.FP32, "table 'user': row 321 holds NaN or infinity", id="infinity"),
        pytest.param(-70_000.0, WeightDtype.INT8, "table 'user': row 321 has a scale or bias beyond FP16", id="bias"),
        pytest.param(7e7, WeightDtype.INT4, "table 'user': row 321 has a scale or bias beyond FP16", id="scale"),
        pytest.param(70_000.0, WeightDtype.FP16, "table 'user': row 321 is beyond FP16", id="FP16"),
    ],
)
def test_a_row_that_does_not_fit_its_dtype_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, dtype: WeightDtype, message: str
) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 6400)  # the row is not in the first block
    module = collection()
    with torch.no_grad():
        module.embedding_bags["user"].weight[321, 2] = value
    with pytest.raises(QuantizeError, match=message):
        export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"user": dtype}))
    assert list((tmp_path / "r").iterdir()) == []


def test_blocks_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_model(collection(), tmp_path / "r", "m")
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 1000)
    blocks = export_model(collection(), tmp_path / "r", "m")
    assert (whole / "weights.0.bin").read_bytes() == (blocks / "weights.0.bin").read_bytes()
    parity = [open_bundle(bundle).manifest.parity for bundle in (whole, blocks)]
    for one, other in zip(*parity, strict=True):
        for name in ("largest", "worst_row"):
            assert getattr(one.quantized, name) == getattr(other.quantized, name)
        for name in ("mean", "cosine"):
            assert getattr(one.quantized, name) == pytest.approx(getattr(other.quantized, name))
        assert msgspec.structs.replace(one, quantized=other.quantized) == other


def test_a_table_that_moves_past_its_limit_fails_the_export(tmp_path: Path) -> None:
    limits = ExportConfig(dtype={"*": WeightDtype.INT4}, max_error={"user": 1e-3})
    with pytest.raises(ParityError, match=r"table 'user': INT4 moves an element by .*, expected at most 0\.001"):
        export_model(collection(), tmp_path / "r", "m", limits)
    assert list((tmp_path / "r").iterdir()) == []


def corrupt_codes(table: str, start: int, rows: torch.Tensor, dtype: WeightDtype) -> torch.Tensor:
    stored = quantize(table, start, rows, dtype)
    if table == "genre":
        stored[7, 5] ^= 0x80
    return stored


def test_a_limit_with_a_dtype_is_a_gate_and_without_one_a_choice(tmp_path: Path) -> None:
    config = ExportConfig(max_error={"user": 3e-3}, dtype={"item": WeightDtype.INT4})
    tables = open_bundle(export_model(collection(), tmp_path / "r", "m", config)).manifest.tables
    assert [table.dtype.value for table in tables] == ["FP16", "INT4", "INT8", "INT8"]
    with pytest.raises(ParityError, match="table 'user': INT8 moves an element by"):
        export_model(
            collection(), tmp_path / "r", "m", ExportConfig(max_error={"*": 1e-3}, dtype={"*": WeightDtype.INT8})
        )


def test_a_quantizer_that_is_wrong_in_one_code_fails_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "quantize", corrupt_codes)
    with pytest.raises(ParityError, match="table 'genre': row 7 moved further than rounding explains"):
        export_model(collection(), tmp_path / "r", "m")


def test_a_program_that_is_wrong_for_one_table_fails_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_wrongly(manifest: Any) -> Any:
        program = compile_program(manifest)
        program.tbe.weights_offsets[3] += 1  # the first byte of `genre`
        return program

    monkeypatch.setattr(pipeline, "compile_program", compile_wrongly)
    with pytest.raises(ParityError, match="table 'genre': the compiled program answers differently, by"):
        export_model(collection(), tmp_path / "r", "m")


@pytest.mark.usefixtures("_answering_anew")
def test_a_bundle_that_a_fresh_process_cannot_open_fails_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_half_of_it(program: Any, path: Path) -> None:
        save_program(program, path)
        os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(pipeline, "save_program", save_half_of_it)
    with pytest.raises(ParityError, match=r"a fresh process could not answer from it:\n(.|\n)*program\.pt"):
        export_model(collection(), tmp_path / "r", "m")
    assert list((tmp_path / "r").iterdir()) == []


def test_nothing_is_published_that_serving_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that JSON does not have, wherever it came from: the manifest would say null."""

    def with_no_number(*arguments: Any) -> Any:
        first, *others = check_parity(*arguments)
        return msgspec.structs.replace(first, limit=float("inf")), *others

    export_model(collection(), tmp_path / "r", "m")
    before = files(tmp_path)
    monkeypatch.setattr(pipeline, "check_parity", with_no_number)
    with pytest.raises(PublishError, match=r"could not be served: .*Expected `float`, got `null`"):
        export_model(collection(), tmp_path / "r", "m")
    assert files(tmp_path) == before


def test_config_pbtxt_is_what_the_design_asks_for(repository: Path) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    def parse(name: str) -> Any:
        return text_format.Parse((repository / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())

    config = parse("mixed")
    assert config.name == "mixed"
    assert config.max_batch_size > 1
    assert config.HasField("dynamic_batching")
    assert [(each.name, each.allow_ragged_batch) for each in config.input] == [("values", True), ("lengths", True)]
    assert config.parameters["features"].string_value == "user_id,item_id,recent_items,genres,words"
    assert config.parameters["dims"].string_value == "16,32,32,8,24"
    assert all(each.string_value for name in ("mixed", "weighted") for each in parse(name).parameters.values())
    assert [each.name for each in parse("weighted").input] == ["values", "lengths", "weights"]
    assert parse("half").output[0].data_type == model_config_pb2.TYPE_FP16


def test_progress_covers_every_byte(tmp_path: Path) -> None:
    seen: list[pipeline.Progress] = []
    export_model(collection(), tmp_path / "r", "m", progress=seen.append)
    total = sum(4 * spec.rows * spec.dim for spec in MIXED)
    assert [each.step for each in seen] == ["user", "item", "genre", "word", "parity"]
    assert {each.total for each in seen} == {total}
    assert seen[-1].done == seen[-2].done == total
