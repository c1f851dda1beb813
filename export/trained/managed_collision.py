"""TorchRec's managed collision modules, which turn raw ids into row numbers before a lookup (torchrec 1.8).

`ManagedCollisionEmbeddingBagCollection` has an EmbeddingBagCollection and such a module for each table,
`ManagedCollisionEmbeddingCollection` an EmbeddingCollection. In eval, MCHManagedCollisionModule searches its sorted
raw ids, and gives unknown ids the last row. HashZchManagedCollisionModule calls FBGEMM's `zero_collision_hash`, which
gives unknown ids the row of their hash. In eval, neither changes its state. A HashZchManagedCollisionModule with an
`input_hash_size` fails for ids outside of [0, that size), which it rounds up to a multiple of its buckets.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule

from serving.torchscript import torchscript

try:
    with torchscript():  # TorchRec compiles a function of this module when it is imported
        from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
except Exception:  # without TorchScript the import fails, and no model has such a module

    class HashZchManagedCollisionModule:  # type: ignore[no-redef]
        """In place of TorchRec's."""


_MANAGED, _MODULES = "_managed_collision_collection", "_managed_collision_modules"


@dataclass(frozen=True, slots=True)
class SortedIds:
    """The state of an MCHManagedCollisionModule.

    Attributes:
        raw_ids: the key of its sorted raw ids in a state dict; int64 [rows].
        slots: the key of their rows; int64 [rows].
    """

    raw_ids: str
    slots: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its state."""
        return self.raw_ids, self.slots


@dataclass(frozen=True, slots=True)
class HashZch:
    """The state and settings of a HashZchManagedCollisionModule.

    Attributes:
        identities: the key of its ids by row in a state dict, -1 for an empty row; int64 [rows, 1].
        bucket_count: the key of the number of buckets; int64 [1, 1]. Older checkpoints do not have it.
        bounds: the rows of the buckets: bucket b has the rows [bounds[b], bounds[b + 1]).
        divided: whether the index of an id within its bucket is hashed, and not the id itself.
        input_hash_size: the number of valid ids, which are divided among the buckets in equal ranges, rounded up. 0:
            any int64 is valid, and an id's bucket is its remainder.
        max_probe: the most rows that are searched for an id.
    """

    identities: str
    bucket_count: str
    bounds: tuple[int, ...]
    divided: bool
    input_hash_size: int
    max_probe: int

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its state."""
        return self.identities, self.bucket_count


TrainedIdMap = SortedIds | HashZch


def id_maps_of(path: str, collection: Any) -> dict[str, TrainedIdMap]:
    """The module that remaps the ids of each table of the collection at `path`, by table."""
    if not isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        return {}
    return {
        table: _state_of(".".join(filter(None, [path, _MANAGED, _MODULES, table])), module)
        for table, module in getattr(getattr(collection, _MANAGED), _MODULES).items()
    }


def _state_of(path: str, module: Any) -> TrainedIdMap:
    if isinstance(module, MCHManagedCollisionModule):
        return SortedIds(f"{path}._mch_sorted_raw_ids", f"{path}._mch_remapped_ids_mapping")
    return HashZch(
        f"{path}._hash_zch_identities",
        f"{path}._hash_zch_bucket",
        tuple(module._output_segments),
        module.input_mapper._inference_dispatch_div_train_world_size,
        module.input_mapper._input_hash_size,
        module._max_probe,
    )


def unknown_managed(collection: BaseManagedCollisionEmbeddingCollection) -> Iterator[tuple[str, nn.Module, str]]:
    """The modules that remap ids in a way that is not served: path in `collection`, module, and why."""
    managed: Any = getattr(collection, _MANAGED)
    if type(managed) is not ManagedCollisionCollection:
        yield _MANAGED, managed, "expected a ManagedCollisionCollection"
        return
    modules = getattr(managed, _MODULES)
    tables = [config.name for config in managed.embedding_configs()]
    if list(modules) != tables:  # torchrec gives the n-th module the ids of the n-th table, whatever its name
        yield _MANAGED, managed, f"expected modules in the order of its tables, {tables}, got {list(modules)}"
    readers: dict[str, str] = {}
    for config in managed.embedding_configs():
        for key in config.feature_names:
            if key in readers:  # torchrec gives both the ids that the last one remapped
                both = f"{readers[key]!r} and {config.name!r}"
                yield _MANAGED, managed, f"expected a table of its own for each feature, {key!r} is read by {both}"
            readers[key] = config.name
    for table, module in modules.items():
        if (why := _unknown(module)) is not None:
            yield f"{_MANAGED}.{_MODULES}.{table}", module, why


def _unknown(module: Any) -> str | None:
    """Why a module is not served, or None if it is."""
    if type(module) is MCHManagedCollisionModule:
        refused: Mapping[str, bool] = {
            "has an input_hash_func, which is code: apply it where requests are made": module._input_hash_func
            is not None,
            "is a shard of a module (output_global_offset)": module._output_global_offset != 0,
        }
    elif type(module) is HashZchManagedCollisionModule:
        refused = {
            "has an input_hash_size that is no number of ids: expected one from 0 to 2⁶³ − 1": not (
                0 <= module._input_hash_size < 2**63
            ),
            "has disable_fallback: expected other ids to read the row of their hash": module._disable_fallback,
            "has an opt_in_prob: FBGEMM cannot look such ids up on a CPU": module._opt_in_prob != -1,
            "is a shard of a module (start_bucket, end_bucket)": module.is_sharded,
            "has buckets without rows (output_segments)": any(
                low >= high for low, high in pairwise(module._output_segments)
            ),
        }
    else:
        return "expected an MCHManagedCollisionModule or a HashZchManagedCollisionModule"
    return next((why for why, is_so in refused.items() if is_so), None)


@contextmanager
def looking_up(module: nn.Module) -> Iterator[None]:
    """In the block, the managed collision modules of `module`, in eval, take any KJT on a CPU.

    Without it, a ManagedCollisionCollection expects the keys in the order of its first call, and HashZch with an
    eviction policy asks FBGEMM for evictions even in eval, which FBGEMM's CPU operator refuses.
    """
    restored: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        if isinstance(part, ManagedCollisionCollection):
            restored += [(part, "_features_order", part._features_order)]
            restored += [(part, "_created_feature_order", part._created_feature_order)]
            part._features_order, part._created_feature_order = [], [False]
        if isinstance(part, HashZchManagedCollisionModule):
            restored += [(part, name, getattr(part, name)) for name in ("_eviction_module", "_eviction_policy_name")]
            part._eviction_module = part._eviction_policy_name = None
    try:
        yield
    finally:
        for part, name, value in restored:
            setattr(part, name, value)
