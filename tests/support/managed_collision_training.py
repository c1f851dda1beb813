"""Train a collection behind a managed collision module with TorchRec's DistributedModelParallel on two gloo processes,
and save it with torch.distributed.checkpoint.

Usage: python -m tests.support.managed_collision_training FOLDER
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.managed_collision import CPU, POLICIES, bags_of, collection_behind, kjt_of, numbers_of
from tests.support.models import Spec
from tests.support.two_processes import WORLD_SIZE, process_group, spawn_both

STEPS = 8


def whole() -> nn.ModuleDict:
    """The model, untrained."""
    module = MCHManagedCollisionModule(48, CPU, POLICIES[0](), eviction_interval=2, buckets=WORLD_SIZE)
    return nn.ModuleDict({"sparse": collection_behind({"user": module}, [Spec("user", 48, 16, "SUM", ("x",))])})


def train(rank: int, folder: str, meeting: str) -> None:
    with process_group(rank, meeting):
        sparse: Any = whole()["sparse"]
        apply_optimizer_in_backward(torch.optim.SGD, sparse._embedding_module.parameters(), {"lr": 0.5})
        sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder())
        plan = construct_module_sharding_plan(
            sparse,
            {"user": row_wise()},
            sharder=sharder,
            local_size=WORLD_SIZE,
            world_size=WORLD_SIZE,
            device_type="cpu",
        )
        parallel = DistributedModelParallel(
            nn.ModuleDict({"sparse": sparse}),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            plan=ShardingPlan({"sparse": plan}),
            sharders=[sharder],
            device=CPU,
        )
        random = np.random.default_rng(rank)
        for _ in range(STEPS):
            answer, _ = parallel.module["sparse"](kjt_of(bags_of(random, 8, "x")))
            numbers_of(answer.wait()).sum().backward()
        save({"model": parallel.state_dict()}, checkpoint_id=folder)


if __name__ == "__main__":
    spawn_both(train, *sys.argv[1:])
