"""Checkpoints: the rows of trained tables, read in blocks, never all at once. And one of generated rows: tables of
any size that take 16 MiB, for benchmarks, studies and tests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from export.errors import CheckpointError
from export.trained import dcp, safetensors_file
from export.trained.archive import locate_tensors
from export.trained.checkpoint_files import CheckpointFiles
from export.trained.sources import StoredTable
from export.trained.tables import TrainedTable

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

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
        files: the files that they are read from; None: they are in none.
    """

    _files: CheckpointFiles | None = None  # also of a class that reads rows in its own way

    def __init__(self, source: str, stored: Mapping[str, StoredTable], files: CheckpointFiles | None = None) -> None:
        self._source = source
        self._stored = stored
        self._files = files

    @property
    def fingerprint(self) -> str | None:
        """As `CheckpointFiles.fingerprint`; None: the weights are in no file."""
        return None if self._files is None else self._files.fingerprint

    def check_unchanged(self) -> None:
        """Refuse what was read so far, if a file has changed since it was opened. Call it before rows are published.

        Raises:
            CheckpointError: as `CheckpointFiles.check_unchanged`.
        """
        if self._files is not None:
            self._files.check_unchanged()

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
        if stored.shape not in (shape, (*shape, 1)):  # a number is [1]
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
        files = CheckpointFiles(path, dcp.FILES)
        return Checkpoint(str(path), dcp.open_folder(path, files), files)
    index = _safetensors_index(path)
    if index is not None:
        files = CheckpointFiles(index.parent, safetensors_file.FILES)
        return Checkpoint(str(path), safetensors_file.locate_in_set(files, index.name), files)
    if path.is_file():
        files = CheckpointFiles(path.parent)
        locate = safetensors_file.locate_in_file if path.suffix == ".safetensors" else locate_tensors
        return Checkpoint(str(path), locate(files.open(path.name)), files)
    found = "a folder with neither" if path.is_dir() else "nothing"
    raise CheckpointError(
        f"{path}: expected a file, or a folder with a {dcp.METADATA} or a {safetensors_file.INDEX}, found {found}"
    )


def _safetensors_index(path: Path) -> Path | None:
    """The index of a sharded set of safetensors; None: `path` is no such set."""
    indexes = list(path.glob(safetensors_file.INDEX)) if path.is_dir() else [path]
    is_one = len(indexes) == 1 and indexes[0].match(safetensors_file.INDEX)
    return indexes[0] if is_one and indexes[0].is_file() else None


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
