"""Copies of a model: one to trace and to run, and one with its tensors on the CPU."""

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

import torch
from torch import Tensor, nn

from export.errors import ModelError, last_line

# The dicts of a module with its submodules, parameters and buffers.
MODULE_DICTS = ("_modules", "_parameters", "_buffers")


def on_cpu(model: nn.Module) -> nn.Module:
    """`model`, or a copy of it on the CPU if it has tensors on another device, such as a GPU.

    Tables are copied as well. Tensors on the meta device stay there. Attributes that are a `torch.device` become the
    CPU, because modules make tensors on it.

    Raises:
        ModelError: it cannot be copied.
    """
    attributes = [value for part in model.modules() for value in vars(part).values()]
    values = [*model.parameters(), *model.buffers(), *attributes]
    moved = {id(value): on_host for value in values if (on_host := _on_cpu(value)) is not value}
    return copy_model(model, (), moved) if moved else model


def _on_cpu(value: object) -> object:
    """A tensor or device of another device, as one of the CPU; any other value as it is."""
    if not isinstance(value, Tensor | torch.device):
        return value
    device = value if isinstance(value, torch.device) else value.device
    if device.type in ("cpu", "meta"):
        return value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    tensor = value.detach().cpu()
    return nn.Parameter(tensor, value.requires_grad) if isinstance(value, nn.Parameter) else tensor


def copy_model(
    model: nn.Module, collections: Iterable[nn.Module], replacements: Mapping[int, object] = MappingProxyType({})
) -> nn.Module:
    """A copy of `model`: modules, weights, buffers, hooks, and all other attributes.

    Attributes that cannot be copied, such as a lock, are shared.

    Args:
        model: the model.
        collections: parts of it whose parameters and buffers are shared, not copied, because tables are large. One
            that is tied to another layer is copied: the layer may write to it.
        replacements: what replaces an object, by the object's id.

    Raises:
        ModelError: it cannot be copied.
    """
    inside = {part for collection in collections for part in collection.modules()}
    outside = [part for part in model.modules() if part not in inside]
    tied = {id(tensor) for part in outside for tensor in (*part._parameters.values(), *part._buffers.values())}
    table_tensors = [tensor for part in inside for tensor in (*part._parameters.values(), *part._buffers.values())]
    shared: dict[int, object] = {
        id(tensor): tensor for tensor in table_tensors if tensor is not None and id(tensor) not in tied
    }
    shared |= replacements
    with suppress(Exception):  # the user's code may raise anything
        return copy.deepcopy(model, {**shared})
    attributes = [value for part in model.modules() for name, value in vars(part).items() if name not in MODULE_DICTS]
    for value in attributes:
        if id(value) not in shared and not _is_copyable(value, shared):
            # torch does not copy a tensor that was computed.
            shared[id(value)] = value.detach().clone() if isinstance(value, Tensor) else value
    try:
        return copy.deepcopy(model, {**shared})
    except Exception as error:  # the user's code may raise anything
        raise ModelError(f"{type(model).__name__}: cannot be copied (copy.deepcopy): {last_line(error)}") from error


def _is_copyable(value: object, shared: Mapping[int, object]) -> bool:
    try:
        copy.deepcopy(value, {**shared})
    except Exception:  # the user's code may raise anything
        return False
    return True
