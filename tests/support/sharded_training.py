"""Train with TorchRec's DistributedModelParallel on two gloo processes and save with torch.distributed.checkpoint.

Usage: python -m tests.support.sharded_training FOLDER
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import Spec, collection, flat, random_bags
from tests.support.two_processes import WORLD_SIZE, process_group, spawn_both

SHARDED = (
    Spec("by_row", 101, 16, "SUM", ("f_row",)),
    Spec("by_column", 50, 32, "MEAN", ("f_column",)),
    Spec("whole", 30, 16, "SUM", ("f_whole",)),
)
STEPS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection(SHARDED)
        self.over = nn.Linear(64, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over(self.sparse(features).values())
        return logits


def train(rank: int, folder: str, meeting: str) -> None:
    with process_group(rank, meeting):
        model = Model()
        apply_optimizer_in_backward(torch.optim.SGD, model.sparse.parameters(), {"lr": 0.5})
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            model.sparse,
            {"by_row": row_wise(), "by_column": column_wise(ranks=[0, 1]), "whole": table_wise(rank=1)},
            sharder=sharder,
            local_size=WORLD_SIZE,
            world_size=WORLD_SIZE,
            device_type="cpu",
        )
        parallel = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            plan=ShardingPlan({"sparse": plan}),
            sharders=[sharder],
            device=torch.device("cpu"),
        )
        random = np.random.default_rng(rank)
        for _ in range(STEPS):
            bags = random_bags(random, SHARDED, 8)
            values, lengths = flat(bags)
            kjt = KeyedJaggedTensor.from_lengths_sync(list(bags), torch.from_numpy(values), torch.from_numpy(lengths))
            (parallel(kjt) ** 2).sum().backward()
        save({"model": parallel.state_dict()}, checkpoint_id=folder)


if __name__ == "__main__":
    spawn_both(train, sys.argv[1])
