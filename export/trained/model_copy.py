"""Copies of a model: to trace and to run, and with its tensors on the CPU."""

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
    """`model`; where it has tensors on another device, such as a GPU, a copy of it whose tensors are on the CPU.

    Its tables are copied to the memory of the host, too. What is on the meta device stays there. A module that says
    in a `torch.device` where it makes tensors makes them on the CPU.

    Raises:
        ModelError: it cannot be copied.
    """
    attributes = [value for part in model.modules() for value in vars(part).values()]
    values = [*model.parameters(), *model.buffers(), *attributes]
    moved = {id(value): brought for value in values if (brought := _brought(value)) is not value}
    return copy_model(model, (), moved) if moved else model


def _brought(value: object) -> object:
    """A tensor on the CPU, or the CPU, in place of one that is elsewhere; of anything else itself."""
    if not isinstance(value, Tensor | torch.device):
        return value
    device = value if isinstance(value, torch.device) else value.device
    if device.type in ("cpu", "meta"):
        return value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    numbers = value.detach().cpu()
    return nn.Parameter(numbers, value.requires_grad) if isinstance(value, nn.Parameter) else numbers


def copy_model(
    model: nn.Module, collections: Iterable[nn.Module], instead: Mapping[int, object] = MappingProxyType({})
) -> nn.Module:
    """A copy of `model`: modules, weights, buffers, hooks, and whatever else its modules hold.

    Args:
        model: the model.
        collections: parts of it. Their parameters and buffers are shared, not copied, because tables are large. Those
            that a layer has, too, are copied: the layer may write to them. Objects that cannot be copied are shared,
            such as a lock.
        instead: what takes the place of an object, by its id.

    Raises:
        ModelError: it cannot be copied.
    """
    inside = {part for collection in collections for part in collection.modules()}
    others = [part for part in model.modules() if part not in inside]
    tied = {id(tensor) for part in others for tensor in (*part._parameters.values(), *part._buffers.values())}
    of_tables = [tensor for part in inside for tensor in (*part._parameters.values(), *part._buffers.values())]
    shared: dict[int, object] = {
        id(tensor): tensor for tensor in of_tables if tensor is not None and id(tensor) not in tied
    }
    shared |= instead
    with suppress(Exception):  # its code may raise anything
        return copy.deepcopy(model, {**shared})
    attributes = [value for part in model.modules() for name, value in vars(part).items() if name not in MODULE_DICTS]
    shared |= {
        id(value): _alike(value) for value in attributes if not (id(value) in shared or _copies(value, shared))
    }
    try:
        return copy.deepcopy(model, {**shared})
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{type(model).__name__}: cannot be copied (copy.deepcopy): {last_line(error)}") from error


def _alike(value: object) -> object:
    """A tensor with the numbers of one that was computed, which torch does not copy; of anything else itself."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copies(value: object, shared: Mapping[int, object]) -> bool:
    try:
        copy.deepcopy(value, {**shared})
    except Exception:  # it may raise anything
        return False
    return True
