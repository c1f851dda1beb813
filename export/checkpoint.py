"""Trained weights, read table by table in blocks of rows, never all at once."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from export import dcp
from export.archive import locate_tensors
from export.errors import CheckpointError
from export.stored import InMemory, InSafetensors, StoredTable
from export.tables import TrainedTable

# What Hugging Face's tools write beside the files of a sharded set: {"weight_map": {key: file name}}.
_SAFETENSORS_INDEX = "*.safetensors.index.json"
_SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

# Rows travel in blocks of about this many float bytes: enough that threads which work side by side rarely wait
# for one another's Python, few enough that memory does not matter.
_BLOCK_BYTES = 1 << 21


class Checkpoint:
    """Tables by state-dict key.

    Args:
        source: what the weights came from, for messages.
        stored: everything that might be a table. Blocks of rows are read by several threads at once.
    """

    def __init__(self, source: str, stored: Mapping[str, StoredTable]) -> None:
        self._source = source
        self._stored = stored

    def rows(self, table: TrainedTable, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of `table`, fp32 or fp16 [stop − start, dim], on the CPU."""
        return self._find(table).read(start, stop)

    def check(self, table: TrainedTable) -> None:
        """Compare the shape and dtype of `table` with what its config says.

        Raises:
            CheckpointError: it is missing, ambiguous, of another shape, or not fp32 or fp16.
        """
        where = f"{self._source}: table {table.name!r}"
        stored = self._find(table)
        if stored.shape != (table.rows, table.dim):
            raise CheckpointError(f"{where}: expected shape {[table.rows, table.dim]}, got {list(stored.shape)}")
        if stored.dtype not in (torch.float32, torch.float16):
            raise CheckpointError(f"{where}: expected float32 or float16, got {stored.dtype}")

    def _find(self, table: TrainedTable) -> StoredTable:
        """The tensor under the key of `table`, or under the one key that ends in it, behind a wrapper's prefix."""
        if table.key in self._stored:
            return self._stored[table.key]
        matches = [key for key in self._stored if key.endswith("." + table.key)]
        if len(matches) != 1:
            found = ", ".join(matches or sorted(self._stored)[:8]) or "nothing"
            raise CheckpointError(
                f"{self._source}: table {table.name!r}: expected one key {table.key!r}, found {found}"
            )
        return self._stored[matches[0]]


# A file or folder as `open_checkpoint` takes it; tables that can be read some other way; or None, the module's own.
WeightSource = Path | str | Checkpoint | None


def block_bounds(table: TrainedTable) -> Iterator[tuple[int, int]]:
    """The rows of `table` from first to last in blocks [start, stop)."""
    step = max(1, _BLOCK_BYTES // (4 * table.dim))
    for start in range(0, table.rows, step):
        yield start, min(start + step, table.rows)


def blocks(table: TrainedTable, weights: Checkpoint) -> Iterator[tuple[int, Tensor]]:
    """Those blocks [n, dim], each with the number of its first row."""
    for start, stop in block_bounds(table):
        yield start, weights.rows(table, start, stop)


def module_weights(module: nn.Module, tables: Iterable[TrainedTable]) -> Checkpoint:
    """The weights of `tables` that `module` itself holds.

    Raises:
        CheckpointError: they are on the meta device, or sharded over several processes.
    """
    source = type(module).__name__
    state = module.state_dict()
    stored = {}
    for table in tables:
        tensor = state[table.key]
        if type(tensor) is not Tensor:
            raise CheckpointError(
                f"{source}: table {table.name!r}: expected a plain tensor, found {type(tensor).__name__}: save the "
                "model with torch.distributed.checkpoint and give the folder as checkpoint"
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"{source}: table {table.name!r}: is on the meta device and has no weights: give a checkpoint"
            )
        stored[table.key] = InMemory(tensor)
    return Checkpoint(source, stored)


def open_weights(module: nn.Module, tables: Iterable[TrainedTable], checkpoint: WeightSource) -> Checkpoint:
    """The weights of `tables`, in `checkpoint` or, where that is None, in `module` itself.

    Raises:
        CheckpointError: as `open_checkpoint` and `module_weights`.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    return module_weights(module, tables) if checkpoint is None else open_checkpoint(checkpoint)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open trained weights without reading them.

    Args:
        path: a state dict saved by `torch.save`, which may be nested in other dicts; a .safetensors file; a
            folder with a sharded set of them and its index, or the index; or a folder of
            torch.distributed.checkpoint, saved by any number of processes.

    Raises:
        CheckpointError: it is none of these, or holds something that only running code could read.
    """
    path = Path(path)
    if path.is_dir() and (path / dcp.METADATA).exists():
        return Checkpoint(str(path), dcp.open_folder(path))
    if path.is_dir() and len(indexes := list(path.glob(_SAFETENSORS_INDEX))) == 1:
        return Checkpoint(str(path), _open_safetensors_set(indexes[0]))
    if path.is_file() and path.match(_SAFETENSORS_INDEX):
        return Checkpoint(str(path), _open_safetensors_set(path))
    if path.is_file():
        return Checkpoint(
            str(path), _open_safetensors(path) if path.suffix == ".safetensors" else locate_tensors(path)
        )
    found = "a folder with neither" if path.is_dir() else "nothing"
    raise CheckpointError(
        f"{path}: expected a file, or a folder with a {dcp.METADATA} or a {_SAFETENSORS_INDEX}, found {found}"
    )


def _open_safetensors_set(index: Path) -> dict[str, InSafetensors]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected an index of safetensors files: {error!r}") from error
    return {key: table for name in sorted(names) for key, table in _open_safetensors(index.parent / name).items()}


def _open_safetensors(path: Path) -> dict[str, InSafetensors]:
    stored = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                slice_ = file.get_slice(key)
                dtype = _SAFETENSORS_DTYPES.get(slice_.get_dtype(), torch.uint8)
                stored[key] = InSafetensors(path, key, tuple(slice_.get_shape()), dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file: {error}") from error
    return stored
