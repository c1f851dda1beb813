"""Archives of `torch.save`: which tensors they hold, and at which bytes. The numbers are not read."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from export.errors import CheckpointError
from export.trained.sources import InFile
from serving.files.reading import open_file


def locate_tensors(path: Path, start: int = 0, length: int | None = None) -> dict[str, InFile]:
    """Find the tensors of the archive at bytes [start, start + length) of `path`.

    Only tensors and plain containers are unpickled (`weights_only`).

    Args:
        path: the file.
        start: the archive's first byte.
        length: the archive's bytes; it reaches to the end of the file where None.

    Returns:
        Tensors by key. A key in nested dicts is "outer.inner"; it is "" where the archive is one tensor.

    Raises:
        CheckpointError: there is no such archive, or it holds something else.
    """
    length = path.stat().st_size - start if length is None else length
    try:
        # A fake tensor has a shape, and knows where in the archive its storage lies. It has no numbers.
        with open_file(path, follow=True) as file, FakeTensorMode():
            archive: Any = _create_file_view(file, start, length)
            loaded = torch.load(archive, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises to run the file's code
        raise CheckpointError(
            f"{path}: expected tensors and plain containers alone at byte {start}, found what only running code "
            "could read: save a state dict, torch.save(module.state_dict(), …)"
        ) from error
    except Exception as error:  # zip, pickle and torch raise errors of their own; none names the file
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: expected an archive of torch.save at byte {start}: {why}") from error
    return {key: _locate(path, start, tensor) for key, tensor in _flatten(loaded).items()}


def _locate(path: Path, start: int, tensor: Tensor) -> InFile:
    size = tensor.element_size()
    archived = tensor.untyped_storage()._checkpoint_offset
    if archived is None:
        raise CheckpointError(f"{path}: holds a tensor whose numbers are not in it: save it with torch.save")
    return InFile(
        path=path,
        offset=start + archived + int(tensor.storage_offset()) * size,
        shape=tuple(tensor.shape) or (1,),
        strides=tuple(stride * size for stride in tensor.stride()) or (size,),
        dtype=tensor.dtype,
    )


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
