"""Load the tables of a checkpoint into a model, so that the model can be run and compared with what is served."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from export.trained.checkpoint import Checkpoint, block_bounds
from export.trained.managed_collision import SortedIds
from export.trained.model_weights import replace_tensor
from export.trained.module_paths import dotted
from export.trained.tables import Trained, TrainedTable
from export.trained.wrapped_collections import inner_of
from serving.tables.memory_budget import memory_limit

_MEMORY = Path("/proc/meminfo")


def default_most_bytes() -> int:
    """The default limit of the tables that are loaded: half of the available memory.

    That is the machine's free memory or the limit of this process, whichever is less.
    """
    lines = _MEMORY.read_text().splitlines() if _MEMORY.exists() else []  # on Linux only
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min(memory_limit(), *free) // 2


def load_tables(
    trained: Trained, weights: Checkpoint, most_bytes: int | None, progress: Callable[[int, int], None]
) -> bool:
    """Load the tables, position weights and id maps of a model's copy, if they fit into memory.

    They take new memory: the original module keeps its own tensors.

    Args:
        trained: the copy.
        weights: the checkpoint.
        most_bytes: the most bytes of tables in FP32 that are loaded; None: `default_most_bytes`.
        progress: called with the bytes that are read so far, as FP32, and the total.

    Returns:
        Whether they were loaded. False if they are too large, on another device, or stored as fused collections do.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or kind of dtype.
    """
    total = sum(table.float_bytes for table in trained.tables)
    if total > (default_most_bytes() if most_bytes is None else most_bytes):
        return False
    state = _state(trained)
    owned = {id(tensor) for tensor in state.values()}
    inner = [inner_of(collection)[1] for collection in trained.collections.values()]
    if not all(id(parameter) in owned for collection in inner for parameter in collection.parameters()):
        return False
    if any(tensor.device.type not in ("cpu", "meta") for tensor in state.values()):
        return False
    tables = {table.key: table for table in trained.tables}
    loaded_bytes = 0
    for key, tensor in state.items():
        if key in tables:
            replace_tensor(trained.module, tensor, _read(tables[key], weights, tensor.dtype))
            loaded_bytes += tables[key].float_bytes
            progress(loaded_bytes, total)
        elif weights.has(key):
            replace_tensor(trained.module, tensor, weights.tensor(key, tensor))
    state = _state(trained)
    for table in tables.values():
        if isinstance(table.id_map, SortedIds):
            # In training, each shard sorted its own ids; load_state_dict of TorchRec's module sorts all of them.
            order = state[table.id_map.raw_ids].argsort(stable=True)
            for key in table.id_map.keys:
                replace_tensor(trained.module, state[key], state[key][order])
    return True


def _state(trained: Trained) -> dict[str, Tensor]:
    """The parameters and buffers of a model's collections, by key."""
    return {
        dotted(path, name): tensor
        for path, collection in trained.collections.items()
        for name, tensor in collection.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _read(table: TrainedTable, weights: Checkpoint, dtype: torch.dtype) -> Tensor:
    """All rows of a table, [rows, dim]."""
    rows = torch.empty(table.rows, table.dim, dtype=dtype)
    for start, stop in block_bounds(table):
        rows[start:stop] = weights.rows(table, start, stop)
    return rows
