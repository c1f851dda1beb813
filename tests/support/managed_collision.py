"""Collections behind managed collision modules, with maps that training filled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from export.trained.managed_collision import looking_up
from serving.client import JaggedRows
from tests.support.models import Bags, Spec, collection, flat
from tests.support.sequence_models import sequences

CPU = torch.device("cpu")
SPECS = (
    Spec("user", 48, 16, "SUM", ("user_id",)),
    Spec("item", 60, 32, "MEAN", ("item_id", "recent")),
    Spec("word", 64, 24, "SUM", ("words",)),
)
ROWS = tuple(replace(spec, dim=16, pooling="NONE") for spec in SPECS)
KEYS = ("user_id", "item_id", "recent", "words")
EXTREMES = (-(2**63), -1, 0, 2**63 - 1, 2**31, -(2**40))
POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)


def mch(rows: int, policy: Any = LFU_EvictionPolicy, **options: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(rows, CPU, policy(), eviction_interval=2, **options)


def zch(rows: int, buckets: int = 1, **options: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(rows, CPU, buckets, **options)


def collection_behind(
    modules: Mapping[str, nn.Module], specs: Sequence[Spec] = SPECS, *, weighted: bool = False, seed: int = 0
) -> BaseManagedCollisionEmbeddingCollection:
    """A collection behind `modules`: one that pools, or where nothing is pooled an EmbeddingCollection."""
    if all(spec.pooling == "NONE" for spec in specs):
        rows = sequences(specs, seed=seed)
        return ManagedCollisionEmbeddingCollection(
            rows, ManagedCollisionCollection(dict(modules), rows.embedding_configs())
        )
    bags = collection(specs, weighted=weighted, seed=seed)
    return ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection(dict(modules), bags.embedding_bag_configs())
    )


def untrained(specs: Sequence[Spec] = SPECS) -> BaseManagedCollisionEmbeddingCollection:
    """A module of each kind; also for `--model`."""
    return collection_behind(
        {"user": mch(48), "item": zch(60, 3, max_probe=16), "word": mch(64, LRU_EvictionPolicy)}, specs
    )


def managed(specs: Sequence[Spec] = SPECS) -> BaseManagedCollisionEmbeddingCollection:
    """As `untrained`, trained."""
    return trained(untrained(specs))


def undealt(
    buckets: int = 3, size: int = 100, divided: bool = False, pooling: str = "SUM"
) -> BaseManagedCollisionEmbeddingCollection:
    """HashZch with an `input_hash_size`: it takes no other ids. Also for `--model`."""
    module = zch(12 * buckets, buckets, input_hash_size=size, inference_dispatch_div_train_world_size=divided)
    return collection_behind({"dealt": module}, [Spec("dealt", 12 * buckets, 8, pooling, ("x", "y"))])


def dealt(
    buckets: int = 3, size: int = 100, divided: bool = False, pooling: str = "SUM"
) -> BaseManagedCollisionEmbeddingCollection:
    """As `undealt`, trained: some ids have rows of their own."""
    module: Any = undealt(buckets, size, divided, pooling).eval()
    (remapping,) = module._managed_collision_collection._managed_collision_modules.values()
    ids = np.random.default_rng(0).integers(0, size, 9 * buckets)
    fill(remapping, [0, size - 1, *ids.tolist()])
    return module


def ids_of(random: np.random.Generator, count: int) -> list[int]:
    """Ids that repeat, so that some become known, among others that do not."""
    often = random.integers(-100, 200, count) * 1_000_003**2
    seldom = random.integers(-(2**63), 2**63 - 1, count)
    return np.where(random.random(count) < 0.8, often, seldom).tolist()  # type: ignore[no-any-return]


def bags_of(random: np.random.Generator, samples: int, keys: Sequence[str] = KEYS) -> dict[str, Bags]:
    bags_by_key = {key: [ids_of(random, size) for size in random.integers(0, 7, samples)] for key in keys}
    for bags in bags_by_key.values():
        if bags:
            bags[0] = [*bags[0], *EXTREMES]
    return bags_by_key


def kjt_of(bags: Mapping[str, Bags], *, weighted: bool = False) -> KeyedJaggedTensor:
    values, lengths = flat(bags)
    weights = torch.linspace(-1, 2, values.size) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(
        list(bags), torch.from_numpy(values), torch.from_numpy(lengths), weights
    )


def trained(module: Any, seed: int = 0, steps: int = 6, keys: Sequence[str] = KEYS) -> Any:
    """`module` after some steps of training. FBGEMM trains HashZch on GPUs alone: its ids are placed by `fill`."""
    random = np.random.default_rng(seed)
    for part in module.modules():
        if isinstance(part, HashZchManagedCollisionModule):
            part.eval()
            fill(part, ids_of(random, part._zch_size))
    optimizer = torch.optim.SGD(module._embedding_module.parameters(), 0.1)
    for _ in range(steps):
        answer, _ = module(kjt_of(bags_of(random, 12, keys), weighted=is_weighted(module)))
        numbers_of(answer).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.eval()


def is_weighted(module: Any) -> bool:
    return not isinstance(module, ManagedCollisionEmbeddingCollection) and module._embedding_module.is_weighted()


def numbers_of(answer: Any) -> Any:
    """All that a collection answers, as one tensor."""
    return (
        torch.cat([jagged.values() for jagged in answer.values()]) if isinstance(answer, Mapping) else answer.values()
    )


def fill(module: HashZchManagedCollisionModule, ids: Sequence[int]) -> None:
    """Put ids where training does: on the first free row from that of their hash on, around their bucket."""
    identities = module._hash_zch_identities
    for id_ in ids:
        x, sizes, offsets = module.input_mapper(values=torch.tensor([id_]))
        slot, _ = torch.ops.fbgemm.zero_collision_hash(
            x, identities, 0, circular_probe=True, readonly=True, local_sizes=sizes, offsets=offsets
        )
        for step in range(min(module._max_probe, int(sizes))):
            row = int(offsets + (slot - offsets + step) % sizes)
            if identities[row, 0] in (-1, x):
                identities[row, 0] = x
                break


def right(module: Any, bags: Mapping[str, Bags], *, weighted: bool = False) -> dict[str, Any]:
    """What the module itself answers, by feature: a tensor, or a JaggedTensor where nothing is pooled."""
    with torch.no_grad(), looking_up(module):
        answer = module(kjt_of(bags, weighted=weighted))[0]
        return answer if isinstance(answer, dict) else answer.to_dict()


def assert_equal(ours: Any, right: Any, name: str) -> None:
    """That the answer for a feature is the module's; that of a sequence bit for bit."""
    if isinstance(ours, JaggedRows):
        np.testing.assert_array_equal(ours.values, right.values(), err_msg=name)
        np.testing.assert_array_equal(ours.lengths, right.lengths(), err_msg=name)
    else:
        np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-5, err_msg=name)


def assert_right(answer: Any, module: Any, bags: Mapping[str, Bags]) -> None:
    if not any(bags.values()):  # without samples, TorchRec's KJT cannot be taken apart
        assert {len(rows) for rows in answer.values()} == {0}
        return
    expected = right(module, bags)
    assert answer.keys() == expected.keys()
    for name, torchrec_answer in expected.items():
        assert_equal(answer[name], torchrec_answer, name)
