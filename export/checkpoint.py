"""Trained weights, read table by table in blocks of rows, never all at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from export.errors import CheckpointError
from export.tables import TrainedTable


class Checkpoint:
    """Weights by state-dict key, sliced when they are read.

    Args:
        source: what the weights came from, for messages.
        tensors: anything with `shape` that gives a Tensor [n, dim] for `[start:stop]`.
    """

    def __init__(self, source: str, tensors: Mapping[str, Any]) -> None:
        self._source = source
        self._tensors = tensors

    def rows(self, table: TrainedTable, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of `table`, fp32 or fp16 [stop − start, dim], on the CPU."""
        rows: Tensor = self._find(table)[start:stop]
        return rows.detach().cpu()

    def check(self, table: TrainedTable) -> None:
        """Compare the shape and dtype of `table` with what its config says.

        Raises:
            CheckpointError: it is missing, ambiguous, of another shape, or not fp32 or fp16.
        """
        where = f"{self._source}: table {table.name!r}"
        found = list(self._shape(table))
        if found != [table.rows, table.dim]:
            raise CheckpointError(f"{where}: expected shape {[table.rows, table.dim]}, got {found}")
        sample = self._find(table)[:1]
        if sample.is_meta:
            raise CheckpointError(f"{where}: the module is on the meta device and has no weights: give a checkpoint")
        if sample.dtype not in (torch.float32, torch.float16):
            raise CheckpointError(f"{where}: expected float32 or float16, got {sample.dtype}")

    def _shape(self, table: TrainedTable) -> list[int]:
        tensor = self._find(table)
        shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
        return list(shape)

    def _find(self, table: TrainedTable) -> Any:
        """The tensor of `table`: its own key, or the one key that ends in it (a wrapper's prefix before it)."""
        if table.key in self._tensors:
            return self._tensors[table.key]
        matches = [key for key in self._tensors if key.endswith("." + table.key)]
        if len(matches) != 1:
            found = ", ".join(matches or sorted(self._tensors)[:8]) or "nothing"
            raise CheckpointError(
                f"{self._source}: table {table.name!r}: expected one key {table.key!r}, found {found}"
            )
        return self._tensors[matches[0]]


def module_weights(module: nn.Module) -> Checkpoint:
    """The weights that `module` itself holds."""
    return Checkpoint(type(module).__name__, module.state_dict())


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a state dict saved by `torch.save` (read with `weights_only`) or a safetensors file.

    The file is memory-mapped. State dicts may be nested in other dicts.

    Raises:
        CheckpointError: there is no such file, or it is neither.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        if path.suffix == ".safetensors":
            file: Any = safe_open(path, framework="pt")
            return Checkpoint(str(path), {key: file.get_slice(key) for key in file.keys()})  # noqa: SIM118
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # each reader has errors of its own, and none of them names the file
        raise CheckpointError(
            f"{path}: expected a state dict saved by torch.save, or a .safetensors file: {error}"
        ) from error
    return Checkpoint(str(path), _flatten(loaded))


def _flatten(loaded: object, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(loaded, Tensor):
        return {prefix: loaded}
    if not isinstance(loaded, Mapping):
        return {}
    return {
        name: tensor
        for key, value in loaded.items()
        for name, tensor in _flatten(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
