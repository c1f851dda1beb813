"""Archives of torch.save: every plain tensor is read exactly, nothing in them is run, and the rest is in nobody's way."""

import io
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

from export import ExportConfig, WeightDtype, export_model
from export.__main__ import app
from export.errors import CheckpointError
from export.trained.checkpoint_files import CheckpointFiles
from export.trained.stored_tensors import InFile, StoredTensor
from export.trained.torch_save_file import locate_tensors
from serving.engine import Engine
from tests.support.models import collection


def located(path: Path) -> dict[str, StoredTensor]:
    return locate_tensors(CheckpointFiles(path.parent).open(path.name)).tensors


def attributed() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    parameter.trained_by = "a colleague"  # type: ignore[attr-defined]
    return parameter


TENSORS = {
    "matrix": torch.randn(5, 4),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "slice": torch.arange(24.0).reshape(4, 6)[1:3, 2:5],
    "transposed": torch.randn(50, 700)[:, 300:600].T,
    "permuted": torch.randn(3, 4, 5, 2).permute(2, 0, 3, 1),
    "expanded": torch.randn(1, 5).expand(7, 5),
    "large and transposed": torch.randn(9, 400_000).T,
    "parameter": nn.Parameter(torch.randn(3)),
    "with attributes": attributed(),
    **{
        str(dtype): torch.tensor([0, 1, 0, 1, 1]).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16)
    },
    **{
        str(dtype): torch.randn(4, 3, dtype=torch.float64).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)
    },
}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_plain_tensor_is_read_exactly(tmp_path: Path, protocol: int) -> None:
    state = OrderedDict(TENSORS)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    torch.save({"model": state, 3: torch.ones(1)}, tmp_path / "w.pt", pickle_protocol=protocol)
    result = located(tmp_path / "w.pt")
    assert [*result] == [*(f"model.{key}" for key in TENSORS), "3"]
    for key, tensor in TENSORS.items():
        stored, rows = result[f"model.{key}"], tensor.reshape(tuple(tensor.shape) or (1,))
        assert (stored.shape, stored.dtype) == (tuple(rows.shape), tensor.dtype)
        for start, stop in [(0, len(rows)), (1, 2), (len(rows) // 2, len(rows))]:
            if stop <= len(rows):
                assert as_bytes(stored.read(start, stop)) == as_bytes(rows[start:stop]), key


@pytest.fixture
def processes() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def deep() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(2000):
        tree = {"inner": tree}
    return tree


def dtensor() -> torch.Tensor:
    return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Replicate()])


def sharded_tensor() -> Any:
    return init_from_local_shards([Shard.from_tensor_and_offsets(torch.ones(4, 4), [0, 0], 0)], 4, 4)


BESIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "DTensor": (dtensor, "found a DTensor: save the model with torch.distributed.checkpoint"),
    "parameter of a DTensor": (lambda: nn.Parameter(dtensor()), "found a DTensor"),
    "ShardedTensor": (sharded_tensor, "found a ShardedTensor: save the model with torch.distributed.checkpoint"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "found a sparse tensor: save a dense tensor in its place"),
    "compressed": (lambda: torch.eye(4).to_sparse_csr(), "found a sparse tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "found a nested tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "found a quantized tensor"),
    "on meta": (lambda: torch.ones(3, device="meta"), "found a tensor on the meta device, which has no numbers"),
    "conjugated": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "found a view that is conjugated"),
    "module": (lambda: nn.Linear(2, 2), ""),
    "objects": (lambda: {"path": Path("x"), "array": np.ones(3), "config": ExportConfig(), "set": {1, 2}}, ""),
    "default dict": (lambda: defaultdict(list, {("a", 1): [2]}), ""),
    "deep": (deep, ""),
}


def save_deep(value: object, path: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # torch.save is recursive
    torch.save(value, path)
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore")  # torch's, about some kinds of tensors
@pytest.mark.parametrize("name", BESIDE)
def test_objects_beside_weights_are_skipped(tmp_path: Path, name: str) -> None:
    make, message = BESIDE[name]
    module, state = collection(), collection().state_dict()
    save_deep({"model": state, "beside": make()}, tmp_path / "w.pt")
    exact = ExportConfig(dtype={"*": WeightDtype.FP32})
    with Engine.open(export_model(module, tmp_path / "r", "m", exact, checkpoint=tmp_path / "w.pt")) as engine:
        np.testing.assert_array_equal(engine.rows("user", [3])[0], state["embedding_bags.user.weight"][3])
    if message:
        key = "embedding_bags.user.weight"
        save_deep({"model": state | {key: make()}}, tmp_path / "n.pt")
        with pytest.raises(CheckpointError, match=f"'model.{key}': expected a plain tensor, {message}"):
            export_model(module, tmp_path / "r", "m", exact, checkpoint=tmp_path / "n.pt")


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def legacy(path: Path) -> None:
    torch.save(collection().state_dict(), path, _use_new_zipfile_serialization=False)


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "c")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (scripted, "found a TorchScript one: save a state dict"),
        (legacy, "found the format from before torch 1.6: load it and save it again"),
        (other_zip, "found a zip file of another kind"),
        (
            lambda path: torch.save(nn.Linear(2, 2), path),
            "found torch.nn.modules.linear.Linear, which only running code",
        ),
        (
            lambda path: path.write_text("hello"),
            "at byte 0: File is not a zip file: it is of another kind, or was cut off",
        ),
        (lambda path: path.touch(), "expected an archive of torch.save at byte 0"),
    ],
    ids=["TorchScript", "legacy", "zip", "module", "text", "empty"],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(tmp_path / "w.pt")
    arguments = ["plan", "--model", "tests.support.models:collection", "--checkpoint", str(tmp_path / "w.pt")]
    done = CliRunner().invoke(app, arguments)
    (line,) = done.stderr.splitlines()
    assert message in line
    assert "weights_only" not in line
    assert done.exit_code == 1


# --- a pickle is a program

HARMFUL = (
    ("os", "system"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("pathlib", "Path.touch"),
    ("torch", "load"),
)


def archive(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("w/data.pkl", content)
    return path


@pytest.mark.promise("Exporting a checkpoint runs no code from its pickles")
@pytest.mark.parametrize(("module", "name"), HARMFUL)
def test_no_pickle_runs_code(tmp_path: Path, module: str, name: str) -> None:
    harmed = tmp_path / "harmed"
    text = f"touch {harmed}"
    called = f"c{module}\n{name}\n(V{text}\nt".encode()
    for content in (
        called + b"R.",
        called + b"\x81.",  # NEWOBJ
        called + b"}\x92.",  # NEWOBJ_EX
        f"(V{text}\ni{module}\n{name}\n.".encode(),  # INST
        f"(c{module}\n{name}\nV{text}\no.".encode(),  # OBJ
        called + b"R}(V__setstate__\n" + called + b"u0b.",
        f"ctorch._utils\n_rebuild_tensor_v2\n}}(V__code__\nc{module}\n{name}\nub.".encode(),  # BUILD of a function
    ):
        with pytest.raises(CheckpointError, match=r"w\.pt: expected"):
            located(archive(tmp_path / "w.pt", content))
    assert not harmed.exists()


def test_a_tensor_does_not_reach_beyond_its_storage(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "w.pt")
    (content, numbers) = (zipfile.ZipFile(tmp_path / "w.pt").read(f"w/{name}") for name in ("data.pkl", "data/0"))
    assert content.count(b"K\x04K\x04\x86") == 1  # its shape
    for shape in (b"K\x05K\x04\x86", b"K\x04K\xff\x86", b"J\xff\xff\xff\xffK\x04\x86", b"K\x04\x85"):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as written:
            written.writestr("w/data.pkl", content.replace(b"K\x04K\x04\x86", shape))
            written.writestr("w/data/0", numbers)
        with pytest.raises(CheckpointError, match=r"is larger than its storage|expected a shape and strides"):
            located(tmp_path / "x.pt")


def test_damaged_archives_raise_no_other_error_than_checkpoint_error(tmp_path: Path) -> None:
    """Bytes of the pickle and of the directory, changed one by one."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(16.0).reshape(4, 4)}, buffer)
    whole, random = buffer.getvalue(), np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for position in random.integers(len(whole), size=3):
            damaged[position] = random.integers(256)
        (tmp_path / "w.pt").write_bytes(damaged[: random.integers(len(whole) // 2, 2 * len(whole))])
        try:
            for tensor in located(tmp_path / "w.pt").values():
                if isinstance(tensor, InFile):
                    tensor.read(0, tensor.shape[0])
        except CheckpointError:
            refused += 1
    assert refused > 200


@pytest.mark.long
def test_a_pickle_cannot_end_the_process(tmp_path: Path) -> None:
    """Keys of a million tuples in one another: their hash would take all of the stack."""
    for content in (b"})" + b"\x85" * 1_000_000 + b"Ns.", b"]" * 1_000_000 + b"a" * 999_999 + b"."):
        assert located(archive(tmp_path / "w.pt", content)) == {}
    assert pickle.loads(b"}.") == {}
