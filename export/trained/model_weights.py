"""Open the weights of a model, and load those of a checkpoint into a copy as load_state_dict(strict=True) does."""

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from export.errors import ModelError
from export.trained.checkpoint import Checkpoint, WeightSource, module_weights, open_checkpoint
from export.trained.checkpoint_prefix import COUNTER, ModelKeys
from export.trained.managed_collision import HashZch
from export.trained.module_paths import dotted, named
from export.trained.tables import Trained
from serving.errors import ConfigurationError

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of a state dict that share one memory, and all their names.

    Attributes:
        tensors: the tensors.
        names: the keys of the state dict first, then the paths in the modules that own the tensors.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]


def open_weights(
    module: nn.Module,
    trained: Trained,
    checkpoint: WeightSource,
    prefix: str | None = None,
    *,
    is_whole: bool = False,
) -> Checkpoint:
    """The weights of `module` in a checkpoint, or the tables of `module` itself.

    Args:
        module: the model.
        trained: its tables.
        checkpoint: its weights. None: those of `module`.
        prefix: of its keys in the checkpoint. None: the only one that fits.
        is_whole: whether the checkpoint must have all weights of the model, not only those of its tables.

    Raises:
        CheckpointError: as `open_checkpoint` and `module_weights`; or no prefix has all weights.
        ConfigurationError: a prefix without a checkpoint.
    """
    if checkpoint is None:
        if prefix is not None:
            raise ConfigurationError(
                "checkpoint_prefix (--checkpoint-prefix): expected a checkpoint (--checkpoint) as well"
            )
        return module_weights(module, trained.tables)
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    return opened.of_model(_model_keys(module, trained, is_whole), prefix)


def _model_keys(module: nn.Module, trained: Trained, is_whole: bool) -> ModelKeys:
    """The keys that a checkpoint of `module` has."""
    needed: dict[str, str] = {}
    for table in trained.tables:
        needed[table.key] = f"table {table.name!r}"
        for feature, weights in zip(table.features, table.position_weights or (), strict=False):
            if weights.key is not None:
                needed[weights.key] = f"position weights of feature {feature!r}"
        if table.id_map is not None:
            # Older checkpoints do not have the number of buckets.
            optional = table.id_map.bucket_count if isinstance(table.id_map, HashZch) else None
            needed |= dict.fromkeys(
                (key for key in table.id_map.keys if key != optional), f"map of the ids of table {table.name!r}"
            )
    groups = list(_groups(module))
    paths = [*_paths(module, [module.get_submodule(path) for path in trained.collections])]
    if is_whole:
        for group in groups:
            outside = [name for name in group.names if not _is_inside(name, paths)]
            if outside and not any(name in needed for name in group.names):
                needed[outside[0]] = "weights"
    tables = {table.key for table in trained.tables}
    return ModelKeys(
        needed=needed,
        all={name for group in groups for name in group.names} | {*module.state_dict(keep_vars=True)},
        twins={name: group.names for group in groups for name in group.names if len(group.names) > 1},
        is_whole=is_whole,
        defaults=dict(_counters_of_batches(module)) if is_whole else {},
        ignored=tuple(f"{dotted(path, '_managed_collision_collection')}." for path in paths),
        narrow={
            name: group.tensors[0].dtype
            for group in groups
            for name in group.names
            if name in tables and group.tensors[0].dtype in _HALVES
        },
    )


def _counters_of_batches(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The counters that batch normalization fills in when it loads a state dict from before they were introduced.

    That is `_NormBase._load_from_state_dict` of torch 2.13.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _NormBase) and part.track_running_stats:
            counter = part.num_batches_tracked
            yield dotted(path, COUNTER), torch.tensor(0) if counter is None or counter.is_meta else counter.detach()


def _groups(module: nn.Module) -> Iterator[_Group]:
    """The parameters and persistent buffers of a module."""
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    owned: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    owned |= module.named_buffers(remove_duplicate=False)
    saved = {id(tensor) for tensor in state.values()} | {id(owned[name]) for name in state if name in owned}
    groups: dict[Any, tuple[dict[int, Tensor], dict[str, None]]] = {}
    for name, tensor in (state | {name: tensor for name, tensor in owned.items() if id(tensor) in saved}).items():
        tensors, names = groups.setdefault(_memory(tensor), ({}, {}))
        tensors[id(tensor)] = tensor
        names[name] = None
    yield from (_Group((*tensors.values(),), (*names,)) for tensors, names in groups.values())


def _memory(tensor: Tensor) -> object:
    """A value that is equal for two tensors with the same elements in the same memory."""
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
    ):
        return id(tensor)
    if not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _paths(module: nn.Module, collections: Iterable[nn.Module]) -> Iterator[str]:
    """All paths of collections: a module may have a collection under several names."""
    parts = {*collections}
    yield from (path for path, part in module.named_modules(remove_duplicate=False) if part in parts)


def _is_inside(name: str, paths: Iterable[str]) -> bool:
    return any(not path or name.startswith(f"{path}.") for path in paths)


def load_weights(trained: Trained, weights: Checkpoint) -> None:
    """Load the weights of a model's copy, except for its tables.

    Tables on the meta device become zeros, which take memory only when they are written.

    Raises:
        CheckpointError: a weight is missing, or has another shape or kind of dtype.
        ModelError: the model has code of its own that load_state_dict calls.
    """
    module, collections = trained.module, [*trained.collections.values()]
    paths = [*_paths(module, collections)]
    inside = {part for collection in collections for part in collection.modules()}
    for path, part in module.named_modules():
        if part not in inside:
            _expect_plain_loading(path, part)
    for group in _groups(module):
        outside = [name for name in group.names if not _is_inside(name, paths)]
        if outside:
            numbers = weights.tensor(outside[0], group.tensors[0])
            for tensor in group.tensors:
                if tensor.is_meta:
                    replace_tensor(module, tensor, numbers)
                else:  # in place, since other objects may refer to this tensor
                    with torch.no_grad():
                        tensor.copy_(numbers)
    tables = [parameter for collection in collections for parameter in collection.parameters()]
    for table in tables:
        if table.is_meta:
            replace_tensor(module, table, _zeros(table))


def replace_tensor(module: nn.Module, tensor: Tensor, replacement: Tensor) -> None:
    """Replace a parameter or buffer in all submodules that have it."""
    new: Any = nn.Parameter(replacement, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else replacement
    for part in module.modules():
        tensors: dict[str, Any]
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: new for name, old in tensors.items() if old is tensor})


def _zeros(like: Tensor) -> Tensor:
    """Zeros, for a forward that reads a table itself. They take memory only where they are written."""
    size = like.numel() * like.dtype.itemsize
    file = os.memfd_create("table")
    try:
        os.ftruncate(file, max(size, 1))
        pages = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
    finally:
        os.close(file)
    return pages[:size].view(like.dtype).reshape(like.shape)


def _expect_plain_loading(path: str, part: nn.Module) -> None:
    """Refuse a module that changes what load_state_dict copies: its weights would differ from the checkpoint."""
    hooks: list[Any] = [getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values()]
    hooks += part._load_state_dict_post_hooks.values()
    hooks += [type(part)._load_from_state_dict, type(part).load_state_dict, type(part).set_extra_state]
    for hook in hooks:
        home = str(getattr(hook.func if isinstance(hook, partial) else hook, "__module__", ""))
        if home.partition(".")[0] not in ("torch", "torchrec"):
            raise ModelError(
                f"{named(path, part)}: has code of its own that load_state_dict calls, which may change weights: "
                "load the checkpoint into the model yourself, and export it without a checkpoint"
            )
