"""Train a collection behind a managed collision module with TorchRec's DistributedModelParallel on two gloo processes,
and save it with torch.distributed.checkpoint.

Usage: python -m tests.support.sharded_managed FOLDER POOLING
"""

import os
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.multiprocessing.spawn import spawn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.managed import CPU, POLICIES, bags_of, behind, kjt_of, numbers_of
from tests.support.models import Spec

WORLD_SIZE = 2
STEPS = 8


def whole(pooling: str) -> nn.ModuleDict:
    """The model, untrained. It pools by SUM; or with NONE it does not."""
    module = MCHManagedCollisionModule(48, CPU, POLICIES[0](), eviction_interval=2, buckets=WORLD_SIZE)
    return nn.ModuleDict({"sparse": behind({"user": module}, [Spec("user", 48, 16, pooling, ("x",))])})


def train(rank: int, folder: str, pooling: str, meeting: str) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(number) for name, number in names.items()})
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD_SIZE)
    sparse: Any = whole(pooling)["sparse"]
    apply_optimizer_in_backward(torch.optim.SGD, sparse._embedding_module.parameters(), {"lr": 0.5})
    sharder: Any = (
        ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder())
        if pooling == "NONE"
        else ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder())
    )
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
    dist.destroy_process_group()


if __name__ == "__main__":
    # A file: a port that is free when it is asked for may be taken when it is used.
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, args=(*sys.argv[1:], f"{folder}/meeting"), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
