"""Train on two gloo processes, and publish what changes: all kinds of shards, kernels and optimizers.

Usage: python -m tests.support.streamed_training FOLDER

FOLDER/before and FOLDER/after are checkpoints, FOLDER/r the repository. The last step is a bad one, of which an error
comes in both processes.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from export import ExportConfig, WeightDtype, export_model, stream_deltas
from export.errors import QuantizeError
from tests.support.models import Spec, collection, flat, random_bags
from tests.support.two_processes import WORLD_SIZE, process_group, spawn_both

# Two tables read one feature.
SPECS = (
    Spec("by_row", 101, 16, "SUM", ("f_row",)),
    Spec("by_column", 90, 32, "MEAN", ("f_column", "f_row")),
    Spec("whole", 80, 16, "SUM", ("f_whole",)),
    Spec("everywhere", 70, 8, "SUM", ("f_everywhere",)),
    Spec("dense_columns", 60, 32, "SUM", ("f_dense",)),
)
FEATURES = ("f_row", "f_column", "f_whole", "f_everywhere", "f_dense")
STEPS = 7
# Rows are stored as they are.
CONFIG = ExportConfig(dtype=dict.fromkeys((spec.name for spec in SPECS), WeightDtype.FP32))


class Model(nn.Module):
    """A collection alone, whose fused optimizers differ by table."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection(SPECS)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.sparse(features).values()
        return pooled


def train(rank: int, folder: str, meeting: str) -> None:
    with process_group(rank, meeting):
        dmp = _sharded()
        everywhere = [tensor for name, tensor in dmp.named_parameters() if "everywhere" in name or "dense" in name]
        # Its weight decay changes every row at each step.
        dense = torch.optim.AdamW(everywhere, lr=0.1, weight_decay=0.1)
        _save(dmp, folder, "before")
        repository = Path(folder) / "r"
        if rank == 0:
            export_model(Model(), repository, "m", CONFIG, checkpoint=Path(folder) / "before")
        random = np.random.default_rng(rank)
        with stream_deltas(dmp, repository, "m", every_s=1e-6) as stream:
            for step in range(STEPS):
                _learn(dmp, dense, random)
                if step % 2:  # what is left of the last step is published at the end
                    stream.step()
                assert (stream.published is not None) == (rank == 0 and step > 0)
            _learn(dmp, dense, random)
        _save(dmp, folder, "after")
        _expect_an_error_everywhere(dmp, repository)


def _sharded() -> DistributedModelParallel:
    model = Model()
    for name, parameter in model.sparse.named_parameters():
        if "by_row" in name:
            apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
        elif "by_column" in name or "whole" in name:
            apply_optimizer_in_backward(torch.optim.Adagrad, [parameter], {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.sparse,
        {
            "by_row": row_wise(),
            "by_column": column_wise(ranks=[0, 1]),
            "whole": table_wise(rank=1),
            "everywhere": data_parallel(),
            "dense_columns": column_wise(ranks=[1, 0], compute_kernel="dense"),
        },
        sharder=sharder,
        local_size=WORLD_SIZE,
        world_size=WORLD_SIZE,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"sparse": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def _save(dmp: DistributedModelParallel, folder: str, name: str) -> None:
    save({"model": dmp.state_dict()}, checkpoint_id=Path(folder) / name)
    dist.barrier()


def _learn(dmp: DistributedModelParallel, dense: torch.optim.Optimizer, random: np.random.Generator) -> None:
    bags = random_bags(random, SPECS, 4, FEATURES)
    values, lengths = flat(bags)
    kjt = KeyedJaggedTensor.from_lengths_sync(list(bags), torch.from_numpy(values), torch.from_numpy(lengths))
    dense.zero_grad()
    (dmp(kjt) ** 2).sum().backward()
    dense.step()
    with torch.no_grad():
        dmp(kjt)  # an evaluation changes nothing


def _expect_an_error_everywhere(dmp: DistributedModelParallel, repository: Path) -> None:
    """A row becomes NaN, and one process finds out: both are told. When it is as before, nothing is published."""
    rows = next(tensor for name, tensor in dmp.named_parameters() if "everywhere" in name)
    with stream_deltas(dmp, repository, "m") as stream, torch.no_grad():
        original = rows[:1].clone()
        rows[:1] = torch.nan
        with pytest.raises(QuantizeError, match="table 'everywhere': row 0"):
            stream.publish()
        rows[:1] = original
    assert stream.published is None


if __name__ == "__main__":
    spawn_both(train, sys.argv[1])
