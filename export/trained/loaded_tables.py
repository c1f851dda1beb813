"""The tables of a checkpoint in the memory of a model, so that it can be run and compared with what serves."""

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
from serving.tables.memory_budget import memory_here

_MEMORY = Path("/proc/meminfo")


def default_most_bytes() -> int:
    """The most bytes of tables that are loaded where nothing is said: half of the memory that is free.

    That is what the machine has left, or all that this process may use, whichever is less.
    """
    lines = _MEMORY.read_text().splitlines() if _MEMORY.exists() else []  # it is Linux's
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min(memory_here(), *free) // 2


def load_tables(
    trained: Trained, weights: Checkpoint, most_bytes: int | None, progress: Callable[[int, int], None]
) -> bool:
    """Give the copy of a model its tables, with their position weights and maps of ids, if they fit.

    They take new memory: the module that the copy was made of keeps its own.

    Args:
        trained: the copy.
        weights: has them.
        most_bytes: the most bytes of tables in FP32 that are loaded; None: `default_most_bytes`.
        progress: called with the bytes that are read, as FP32, and all.

    Returns:
        Whether the model has them now. Not where they are too large, on another device, or in another form, as those
        of fused collections are.

    Raises:
        CheckpointError: one of them is missing, or has another shape or kind of numbers.
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
    done = 0
    for key, tensor in state.items():
        if key in tables:
            replace_tensor(trained.module, tensor, _read(tables[key], weights, tensor.dtype))
            done += tables[key].float_bytes
            progress(done, total)
        elif weights.has(key):
            replace_tensor(trained.module, tensor, weights.tensor(key, tensor))
    state = _state(trained)
    for table in tables.values():
        if isinstance(table.id_map, SortedIds):
            # Shards of training sorted their ids each by itself; load_state_dict of TorchRec's module sorts all.
            order = state[table.id_map.raw_ids].argsort(stable=True)
            for key in table.id_map.keys:
                replace_tensor(trained.module, state[key], state[key][order])
    return True


def _state(trained: Trained) -> dict[str, Tensor]:
    """The parameters and buffers of a model's collections, by their keys."""
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
