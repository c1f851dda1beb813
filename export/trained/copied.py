"""A copy of a model, to follow and to run: the model that was given stays as it is."""

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import Tensor, nn

from export.errors import ModelError, last_line

# Where a module keeps its parts, each of which is looked at by itself.
_PARTS = ("_modules", "_parameters", "_buffers")


def copied(model: nn.Module, collections: Iterable[nn.Module]) -> nn.Module:
    """A copy of `model`: modules, weights, buffers, hooks, and whatever else its modules hold.

    Args:
        model: the model.
        collections: parts of it. The copy has their parameters and buffers themselves, since tables are large; not
            those that a layer has, too, which may write to them. It also has what cannot be copied, such as a lock.

    Raises:
        ModelError: it cannot be copied.
    """
    inside = {part for collection in collections for part in collection.modules()}
    others = [part for part in model.modules() if part not in inside]
    tied = {id(each) for part in others for each in (*part._parameters.values(), *part._buffers.values())}
    of_tables = [each for part in inside for each in (*part._parameters.values(), *part._buffers.values())]
    shared: dict[int, object] = {id(each): each for each in of_tables if each is not None and id(each) not in tied}
    with suppress(Exception):  # its code may raise anything
        return copy.deepcopy(model, {**shared})
    held = [each for part in model.modules() for name, each in vars(part).items() if name not in _PARTS]
    shared |= {id(each): _alike(each) for each in held if not _copies(each, shared)}
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
