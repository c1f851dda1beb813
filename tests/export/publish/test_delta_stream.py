"""What a training changed is published as it is trained: compared with checkpoints that torch saves and reads."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from export import export_model, stream_deltas
from export.errors import PublishError
from serving.bundle import open_bundle
from serving.bundle.lineage import delta_path, deltas_folder, lineage_of
from serving.errors import ConfigurationError
from tests.support.deltas import listed
from tests.support.managed_collision import dealt
from tests.support.models import Spec, collection
from tests.support.streamed_training import SPECS, Model
from tests.support.two_processes import run_module


def rows_of(checkpoint: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The tables of a checkpoint, as torch reads them."""
    state = {"model": Model().state_dict()}
    read_checkpoint(state, checkpoint_id=checkpoint)
    return {spec.name: state["model"][f"sparse.embedding_bags.{spec.name}.weight"].numpy() for spec in SPECS}


@pytest.mark.promise(
    "Incremental training publishes exactly the rows that it changed, however its tables are sharded"
)
def test_changed_rows_of_a_two_process_training_are_published(tmp_path: Path) -> None:
    """Cut in all ways, by optimizers that change what was looked up and by one that changes all."""
    run_module("tests.support.streamed_training", str(tmp_path))
    before, after = rows_of(tmp_path / "before"), rows_of(tmp_path / "after")
    folder = deltas_folder(tmp_path / "r") / "m" / lineage_of(open_bundle(tmp_path / "r" / "m" / "1").digest)
    numbers = listed(folder)
    assert numbers == [1, 2, 3, 4]  # of one step, of two each time, and of what was left
    now = {name: rows.copy() for name, rows in before.items()}
    for number in numbers:
        tensors = load(delta_path(folder, number).read_bytes())
        for name, rows in now.items():
            ids = tensors[f"{name}/ids"]
            rows[ids] = tensors[f"{name}/rows"].view(np.float32)
            is_whole = name in ("everywhere", "dense_columns")
            assert (len(ids) == len(rows)) == is_whole, "by row, only what was looked up"
    for name, rows in now.items():
        assert not np.array_equal(before[name], after[name])
        np.testing.assert_array_equal(rows, after[name], name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('meeting')}/m", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


class Rows(nn.Module):
    """The rows of a sequence, for a sum, beside a table that is not exported."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["f"])]
        )

        self.others = collection((Spec("u", 20, 8, "SUM", ("f",)),))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        rows: torch.Tensor = self.rows(ids)["f"].values()
        other_rows: torch.Tensor = self.others(ids).values()
        return rows.sum() + other_rows.sum()


def ids(*of_one_sample: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor(of_one_sample), torch.tensor([len(of_one_sample)]))


def trained(module: nn.Module) -> DistributedModelParallel:
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    return DistributedModelParallel(module, device=torch.device("cpu"))


@pytest.mark.usefixtures("alone")
def test_trained_rows_are_published_unless_the_training_raises(tmp_path: Path) -> None:
    module = Rows()
    folder = deltas_folder(tmp_path / "r") / "m"
    folder /= lineage_of(open_bundle(export_model(module.rows, tmp_path / "r", "m")).digest)
    dmp = trained(module)
    early, late, evaluated = ids(3, 5, 3), ids(7), ids(9)
    with stream_deltas(dmp, tmp_path / "r", "m", every_s=1e-6) as stream:
        coming = dmp(late)  # as a pipeline does, which looks up before the step before
        with torch.no_grad():
            dmp(evaluated)
        dmp(early).backward()
        stream.step()
        coming.backward()
        export_model(Rows().rows, tmp_path / "r", "m", version=2)  # follows nobody
    published = [load(delta_path(folder, number).read_bytes())["t/ids"].tolist() for number in listed(folder)]
    assert published == [[3, 5], [7]]
    assert stream.published is not None
    assert stream.published.version == 1
    dmp(early).backward()
    with suppress(ZeroDivisionError), stream_deltas(dmp, tmp_path / "r", "m", version=1):
        dmp(early).backward()
        raise ZeroDivisionError
    assert listed(folder) == [1, 2]


@pytest.mark.usefixtures("alone")
def test_a_module_that_cannot_be_streamed_is_refused_by_name(tmp_path: Path) -> None:
    def refusal(dmp: Any, model: str, **options: Any) -> str:
        with (
            pytest.raises((ConfigurationError, PublishError)) as refused,
            stream_deltas(dmp, tmp_path, model, **options),
        ):
            pass
        return str(refused.value)

    rows = Rows()
    export_model(rows.rows, tmp_path, "m")
    assert "expected a DistributedModelParallel in a process group, and every_s, seconds > 0, got Rows" in refusal(
        rows, "m"
    )
    dmp = trained(rows)
    assert "got DistributedModelParallel and 0" in refusal(dmp, "m", every_s=0)
    fewer = trained(nn.Sequential(collection((Spec("t", 19, 8, "SUM", ("f",)),))))
    assert "expected 20 rows of 8 columns, each once, in TorchRec's fused or dense kernels, got 152" in refusal(
        fewer, "m"
    )
    twice = trained(nn.ModuleList([collection((Spec("t", 20, 8, "SUM", ("f",)),)), Rows()]))
    assert "got 320 elements in 2 shards" in refusal(twice, "m")
    export_model(dealt(), tmp_path, "raw")
    assert "table 'dealt': its rows are named by raw ids" in refusal(dmp, "raw")
