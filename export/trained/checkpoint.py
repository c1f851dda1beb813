"""Checkpoints: the rows of trained tables, read in blocks, never all at once."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from export.errors import CheckpointError
from export.trained import dcp, safetensors_file
from export.trained.checkpoint_files import CheckpointFiles
from export.trained.checkpoint_prefix import MatchedKeys, ModelKeys, Saved, match_keys
from export.trained.stored_tensors import InFile, InMemory, Narrowed, StoredTensor
from export.trained.tables import TrainedTable
from export.trained.torch_save_file import locate_tensors
from serving.errors import counted

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Float bytes of a block of rows: large enough that threads rarely wait for Python's lock, and small enough that
# memory does not matter.
_BLOCK_BYTES = 1 << 21


class Checkpoint:
    """The rows of tables, by state-dict key.

    Args:
        source: the file, folder or class with the rows, for messages.
        stored: every tensor that may be a table. Several threads read from them at once.
        files: the files that they are read from; None for tensors in memory.
        versions: as `Archive.versions`. None: every weight must be in the checkpoint, whatever its module's version.
    """

    # Class attributes, because a subclass that reads rows itself may not call `__init__`.
    _files: CheckpointFiles | None = None
    _versions: Mapping[str, int] | None = None
    _matched: MatchedKeys | None = None

    def __init__(
        self,
        source: str,
        stored: Mapping[str, StoredTensor],
        files: CheckpointFiles | None = None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        self._source = source
        self._stored = stored
        self._files = files
        self._versions = versions

    @property
    def fingerprint(self) -> str | None:
        """As `CheckpointFiles.fingerprint`; None for tensors in memory."""
        return None if self._files is None else self._files.fingerprint

    def check_unchanged(self) -> None:
        """Refuse what was read so far, if a file has changed since it was opened. Call it before rows are published.

        Raises:
            CheckpointError: as `CheckpointFiles.check_unchanged`.
        """
        if self._files is not None:
            self._files.check_unchanged()

    def of_model(self, keys: ModelKeys, prefix: str | None) -> "Checkpoint":
        """The same checkpoint, with the keys of a model: all are under one prefix.

        Args:
            keys: of the model.
            prefix: the prefix to take. None: the only one that fits.

        Raises:
            CheckpointError: no prefix fits, or several do; or two keys of one tensor have different numbers.
        """
        if type(self).rows is not Checkpoint.rows:  # a subclass that reads rows itself knows their tables
            return self
        matched = match_keys(Saved(self._source, self._stored.keys(), self._versions), keys, prefix)
        stored = {key: self._stored[saved] for key, saved in matched.keys.items()}
        stored |= {key: InMemory(keys.defaults[key]) for key in matched.defaults}
        for key, twins in keys.twins.items():
            for saved in (matched.keys[twin] for twin in twins if twin in matched.keys and twin != key):
                if key in matched.keys and not _are_equal(stored[key], self._stored[saved]):
                    raise CheckpointError(
                        f"{self._source}: {matched.keys[key]!r} and {saved!r} are one tensor of the model, and have "
                        "different numbers here: expected equal ones: build the model as it was trained"
                    )
            if key not in stored and (twin := keys.saved_as(key, matched.keys)) is not None:
                stored[key] = self._stored[matched.keys[twin]]
        for key, dtype in keys.narrow.items():
            if key in stored and stored[key].dtype is not dtype:
                stored[key] = Narrowed(stored[key], dtype)
        checkpoint = copy.copy(self)
        checkpoint._stored, checkpoint._matched = stored, matched
        return checkpoint

    @property
    def summary(self) -> str | None:
        """One line about the keys that were taken from the checkpoint; None for the weights of a module."""
        if self._matched is None:
            return None
        prefix = f"`{self._matched.prefix}` of " if self._matched.prefix else ""
        return f"weights from {prefix}{Path(self._source).name}; {counted(self._matched.unused, 'key')} unused"

    def rows(self, table: TrainedTable, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of `table`: float32 or float16 [stop − start, dim], on the CPU.

        bfloat16 is read as float32, which holds all its numbers: numpy and FBGEMM's operator do not take bfloat16.
        """
        rows = self._stored_at(f"table {table.name!r}", table.key).read(start, stop)
        return rows.float() if rows.dtype is torch.bfloat16 else rows

    def tensor(self, key: str, like: Tensor) -> Tensor:
        """The tensor under a key, as load_state_dict would copy it to `like`: of that shape and dtype.

        Raises:
            CheckpointError: it is missing, has another shape or kind of dtype, or integers that do not fit the dtype
                of `like`.
        """
        stored = self._stored_at("weights", key)
        where, shape = f"{self._source}: weights {key!r}", tuple(like.shape)
        _expect_shape(where, stored, shape)
        if _kind_of(stored.dtype) != _kind_of(like.dtype):
            raise CheckpointError(f"{where}: expected {like.dtype}, got {stored.dtype}: build the model as trained")
        numbers = stored.read(0, stored.shape[0]).reshape(shape)
        converted = numbers.to(like.dtype)
        if _kind_of(like.dtype) == "integers" and not torch.equal(converted.to(stored.dtype), numbers):
            raise CheckpointError(f"{where}: has integers outside {like.dtype}: build the model with {stored.dtype}")
        return converted

    def numbers(self, what: str, key: str, shape: tuple[int, ...]) -> Tensor:
        """The finite numbers under a key of the state dict: float32, of that shape.

        Args:
            what: a description for messages.
            key: the key.
            shape: their shape.

        Raises:
            CheckpointError: they are missing, of another shape or dtype, or not finite.
        """
        where = f"{self._source}: {what}"
        stored = self._stored_at(what, key)
        _expect_floats(where, stored, shape)
        numbers = stored.read(0, stored.shape[0]).float().reshape(shape)
        if not torch.isfinite(numbers).all():
            raise CheckpointError(f"{where}: holds NaN or infinity: find out how the training made it")
        return numbers

    def integers(self, what: str, key: str, size: int) -> npt.NDArray[np.int64]:
        """The integers under a key of the state dict: int64 [size].

        Arguments as `numbers`; `size` is their number.

        Raises:
            CheckpointError: they are missing, not `size` many, or not int64.
        """
        where = f"{self._source}: {what}"
        stored = self._stored_at(what, key)
        if stored.shape not in ((size,), (size, 1)):
            raise _other_shape(where, stored, (size,))
        if stored.dtype is not torch.int64:
            raise CheckpointError(f"{where}: expected int64, got {stored.dtype}")
        return stored.read(0, size).reshape(size).numpy()

    def has(self, key: str) -> bool:
        """Whether there is a tensor under `key`."""
        return key in self._stored

    def check(self, table: TrainedTable) -> None:
        """Refuse a table that differs from its config.

        Raises:
            CheckpointError: the table is missing, of another shape, or of another dtype than float32, float16 and
                bfloat16.
        """
        where = f"{self._source}: table {table.name!r}"
        _expect_floats(where, self._stored_at(f"table {table.name!r}", table.key), (table.rows, table.dim))

    def _stored_at(self, what: str, key: str) -> StoredTensor:
        if key not in self._stored:
            raise CheckpointError(f"{self._source}: {what}: expected the key {key!r}, which is missing")
        return self._stored[key]


def _expect_floats(where: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape, or of another dtype than those of tables."""
    _expect_shape(where, stored, shape)
    if stored.dtype not in _DTYPES:
        raise CheckpointError(f"{where}: expected float32, float16 or bfloat16, got {stored.dtype}")


def _expect_shape(where: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape. A single number is stored as [1]."""
    if stored.shape != (shape or (1,)):
        raise _other_shape(where, stored, shape)


def _other_shape(where: str, stored: StoredTensor, shape: tuple[int, ...]) -> CheckpointError:
    """The error for a tensor that should have had `shape`."""
    stored_shape = "one number" if stored.shape == (1,) else list(stored.shape)
    return CheckpointError(f"{where}: expected shape {list(shape)}, got {stored_shape}")


def _kind_of(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floats"
    return "bool" if dtype is torch.bool else "integers"


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same numbers. Both are read, unless they have the same bytes of a file."""
    if one is other or (isinstance(one, InFile) and one == other):
        return True
    if one.shape != other.shape:
        return False
    step = max(1, _BLOCK_BYTES // max(1, prod(one.shape[1:]) * one.dtype.itemsize))
    bounds = ((start, min(start + step, one.shape[0])) for start in range(0, one.shape[0], step))
    return all(torch.equal(one.read(*block), other.read(*block)) for block in bounds)


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
    tensors = [*module.named_parameters(), *module.named_buffers()]
    state = {name: tensor.detach() for name, tensor in tensors} | module.state_dict()
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


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint without reading its rows.

    Args:
        path: one of
            a state dict saved by `torch.save`, which may be nested in other dicts;
            a .safetensors file;
            a sharded set of .safetensors files: their folder, or its index file;
            a folder of torch.distributed.checkpoint, saved by any number of processes.

    Raises:
        CheckpointError: the path is none of these, or holds objects that only running code could read.
    """
    path = Path(path)
    if path.is_dir() and (path / dcp.METADATA).exists():
        files = CheckpointFiles(path, dcp.FILES)
        return Checkpoint(str(path), dcp.open_folder(path, files), files)
    index = _safetensors_index(path)
    if index is not None:
        files = CheckpointFiles(index.parent, safetensors_file.FILES)
        return Checkpoint(str(path), safetensors_file.locate_in_set(files, index.name), files, versions={})
    if path.is_file():
        files = CheckpointFiles(path.parent)
        if path.suffix == ".safetensors":
            return Checkpoint(str(path), safetensors_file.locate_in_file(files.open(path.name)), files, versions={})
        archive = locate_tensors(files.open(path.name))
        return Checkpoint(str(path), archive.tensors, files, archive.versions)
    got = "a folder with neither" if path.is_dir() else "nothing"
    raise CheckpointError(
        f"{path}: expected a file, or a folder with a {dcp.METADATA} or a {safetensors_file.INDEX}, found {got}"
    )


def _safetensors_index(path: Path) -> Path | None:
    """The index of a sharded set of safetensors, or None if `path` is no such set."""
    indexes = list(path.glob(safetensors_file.INDEX)) if path.is_dir() else [path]
    is_one = len(indexes) == 1 and indexes[0].match(safetensors_file.INDEX)
    return indexes[0] if is_one and indexes[0].is_file() else None
