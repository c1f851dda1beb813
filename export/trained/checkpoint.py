"""Checkpoints: the rows of trained tables, read in blocks, never all at once. And one of generated rows: tables of
any size that take 16 MiB, for benchmarks, studies and tests.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from export.errors import CheckpointError
from export.trained import dcp
from export.trained.sources import InFile, StoredTable, locate_tensors
from export.trained.tables import TrainedTable

# Hugging Face's tools write it beside the files of a sharded set: {"weight_map": {key: file name}}.
_SAFETENSORS_INDEX = "*.safetensors.index.json"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
}

# Float bytes of a block of rows: large enough that threads rarely wait for Python's lock, and small enough that
# memory does not matter.
_BLOCK_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor that a module holds, on any device."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, dim)."""
        return tuple(self.tensor.shape) or (1,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop): a view [stop − start, dim], or a copy where the tensor is not on the CPU."""
        return self.tensor.reshape(self.shape)[start:stop].detach().cpu()


class Checkpoint:
    """The rows of tables, by state-dict key.

    Args:
        source: the file, folder or class with the rows, for messages.
        stored: every tensor that may be a table. Several threads read from them at once.
    """

    def __init__(self, source: str, stored: Mapping[str, StoredTable]) -> None:
        self._source = source
        self._stored = stored

    def rows(self, table: TrainedTable, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of `table`: float32 or float16 [stop − start, dim], on the CPU.

        bfloat16 is read as float32, which has all its numbers: neither numpy nor FBGEMM's operator takes it.
        """
        rows = self._find(table).read(start, stop)
        return rows.float() if rows.dtype is torch.bfloat16 else rows

    def numbers(self, what: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """The numbers under a key of the state dict: float32, of that shape.

        Args:
            what: what they are, for messages.
            key: the key.
            shape: their shape. A vector [n] may be stored as [n, 1], and a number as [1].

        Raises:
            CheckpointError: they are missing, ambiguous, of another shape or dtype, or not finite.
        """
        where = f"{self._source}: {what}"
        stored = self._at(what, key)
        if stored.shape not in (shape, (*shape, 1), (*shape, 1, 1)[:2]):  # a number is [1], or in DCP [1, 1]
            raise CheckpointError(f"{where}: expected shape {list(shape)}, got {list(stored.shape)}")
        if stored.dtype not in _DTYPES:
            raise CheckpointError(f"{where}: expected float32, float16 or bfloat16, got {stored.dtype}")
        numbers = stored.read(0, stored.shape[0]).float().reshape(shape)
        if not torch.isfinite(numbers).all():
            raise CheckpointError(f"{where}: holds NaN or infinity: find out how the training made it")
        return numbers

    def integers(self, what: str, key: str, size: int) -> npt.NDArray[np.int64]:
        """The integers under a key of the state dict: int64 [size].

        Arguments as `numbers`; `size` is their number.

        Raises:
            CheckpointError: they are missing, ambiguous, not `size` many, or not int64.
        """
        where = f"{self._source}: {what}"
        stored = self._at(what, key)
        if stored.shape not in ((size,), (size, 1)):
            raise CheckpointError(f"{where}: expected shape {[size]}, got {list(stored.shape)}")
        if stored.dtype is not torch.int64:
            raise CheckpointError(f"{where}: expected int64, got {stored.dtype}")
        return stored.read(0, size).reshape(size).numpy()

    def has(self, key: str) -> bool:
        """Whether there is a tensor under `key`, with the prefix of a wrapper or without."""
        return any(each == key or each.endswith("." + key) for each in self._stored)

    def check(self, table: TrainedTable) -> None:
        """Refuse a table that differs from its config.

        Raises:
            CheckpointError: the table is missing, ambiguous, of another shape, or of another dtype than float32,
                float16 and bfloat16.
        """
        where = f"{self._source}: table {table.name!r}"
        stored = self._find(table)
        if stored.shape != (table.rows, table.dim):
            raise CheckpointError(f"{where}: expected shape {[table.rows, table.dim]}, got {list(stored.shape)}")
        if stored.dtype not in _DTYPES:
            raise CheckpointError(f"{where}: expected float32, float16 or bfloat16, got {stored.dtype}")

    def _find(self, table: TrainedTable) -> StoredTable:
        return self._at(f"table {table.name!r}", table.key)

    def _at(self, what: str, key: str) -> StoredTable:
        """The tensor under `key`, or under the only key that ends in it: wrappers add a prefix."""
        if key in self._stored:
            return self._stored[key]
        matches = [each for each in self._stored if each.endswith("." + key)]
        if len(matches) != 1:
            found = ", ".join(matches or sorted(self._stored)[:8]) or "nothing"
            raise CheckpointError(f"{self._source}: {what}: expected one key {key!r}, found {found}")
        return self._stored[matches[0]]


# A file or folder for `open_checkpoint`, or a Checkpoint that reads rows in another way. None: the module's own rows.
WeightSource = Path | str | Checkpoint | None


def block_bounds(table: TrainedTable) -> Iterator[tuple[int, int]]:
    """Divide the rows of `table` into blocks [start, stop), from the first to the last."""
    step = block_rows(table)
    for start in range(0, table.rows, step):
        yield start, min(start + step, table.rows)


def block_rows(table: TrainedTable) -> int:
    """The most rows of `table` in a block."""
    return min(max(1, _BLOCK_BYTES // (4 * table.dim)), table.rows)


def blocks(table: TrainedTable, weights: Checkpoint) -> Iterator[tuple[int, Tensor]]:
    """Read the rows of `table` in blocks, float32 or float16 [n, dim], each with the number of its first row."""
    for start, stop in block_bounds(table):
        yield start, weights.rows(table, start, stop)


def module_weights(module: nn.Module, tables: Iterable[TrainedTable]) -> Checkpoint:
    """The rows of `tables` in `module` itself.

    Raises:
        CheckpointError: a table is on the meta device, or sharded over several processes.
    """
    source = type(module).__name__
    # A module may leave its own path out of its state dict, as torchrec's PredictModule does.
    own = [*module.named_parameters(), *module.named_buffers()]
    state = {name: each.detach() for name, each in own} | module.state_dict()
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
        for weights in table.position_weights or ():
            if weights.key is not None:
                stored[weights.key] = InMemory(state[weights.key])
        if table.id_map is not None:
            stored |= {key: InMemory(state[key]) for key in table.id_map.keys if key in state}
    return Checkpoint(source, stored)


def open_weights(module: nn.Module, tables: Iterable[TrainedTable], checkpoint: WeightSource) -> Checkpoint:
    """The rows of `tables`, in `checkpoint`. If that is None, in `module` itself.

    Raises:
        CheckpointError: as `open_checkpoint` and `module_weights`.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    return module_weights(module, tables) if checkpoint is None else open_checkpoint(checkpoint)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint without reading its rows.

    Args:
        path: one of
            a state dict saved by `torch.save`, which may be nested in other dicts;
            a .safetensors file;
            a sharded set of .safetensors files: their folder, or its index file;
            a folder of torch.distributed.checkpoint, saved by any number of processes.

    Raises:
        CheckpointError: it is none of these, or holds objects that only running code could read.
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


def _open_safetensors_set(index: Path) -> dict[str, InFile]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected an index of safetensors files: {error!r}") from error
    return {key: table for name in sorted(names) for key, table in _open_safetensors(index.parent / name).items()}


def _open_safetensors(path: Path) -> dict[str, InFile]:
    """The tensors of a safetensors file: a header that says where each is, then their numbers.

    The format: https://huggingface.co/docs/safetensors#format.
    """
    stored = {}
    try:
        with safe_open(path, framework="pt"), path.open("rb") as file:  # the library checks the header
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    for key, tensor in header.items():
        dtype = _SAFETENSORS_DTYPES.get(tensor["dtype"], torch.uint8)
        shape = tuple(tensor["shape"]) or (1,)
        strides = tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
        stored[key] = InFile(path, 8 + header_bytes + tensor["data_offsets"][0], shape, strides, dtype)
    return stored


# Number of floats in the pool that generated rows are windows of: 16 MiB, so that reading a row costs as much as from
# memory. Knuth's multiplicative hash: neighbouring rows are windows far apart.
_POOL, _STEP = 1 << 22, 2_654_435_761


@dataclass(frozen=True, slots=True)
class GeneratedTable:
    """A table [rows, dim] of windows of `pool`, float32 [n].

    Row r is the window of dim floats that starts at (r · _STEP + seed) mod (n − dim + 1).
    """

    shape: tuple[int, int]
    pool: Tensor
    seed: int
    dtype: torch.dtype = field(default=torch.float32, init=False)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as float32 [stop − start, dim]."""
        return self.rows(torch.arange(start, stop))

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, int64 [n], as float32 [n, dim]."""
        windows = self.pool.as_strided((self.pool.numel() - self.shape[1] + 1, self.shape[1]), (1, 1))
        return windows.index_select(0, (ids * _STEP + self.seed).remainder(len(windows)))


def generated_checkpoint(tables: Sequence[TrainedTable]) -> Checkpoint:
    """Normally distributed floats for `tables`, the same ones every time."""
    return Checkpoint(
        "generated",
        {
            table.key: GeneratedTable((table.rows, table.dim), _pool(), seed=1_000_003 * number)
            for number, table in enumerate(tables)
        },
    )


@cache
def _pool() -> Tensor:
    """The floats that all generated tables share, float32 [_POOL]."""
    return torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.05)
