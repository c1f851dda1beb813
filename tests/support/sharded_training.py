"""Train with TorchRec's DistributedModelParallel on two gloo processes and save with torch.distributed.checkpoint.

Usage: python -m tests.support.sharded_training FOLDER
"""

import os
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.multiprocessing.spawn import spawn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import Spec, collection, flat, random_bags

SHARDED = (
    Spec("by_row", 101, 16, "SUM", ("f_row",)),
    Spec("by_column", 50, 32, "MEAN", ("f_column",)),
    Spec("whole", 30, 16, "SUM", ("f_whole",)),
)
WORLD_SIZE = 2
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
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(number) for name, number in names.items()})
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD_SIZE)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    # A file: a port that is free when it is asked for may be taken when it is used.
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, args=(sys.argv[1], f"{folder}/meeting"), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
