"""A copy of a model, to follow and to run: the model that was given stays as it is."""

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import nn

from export.errors import ModelError, last_line

# Where a module keeps its parts, each of which is looked at by itself.
_PARTS = ("_modules", "_parameters", "_buffers")


def copied(model: nn.Module, collections: Iterable[nn.Module]) -> nn.Module:
    """A copy of `model`: modules, weights, buffers, hooks, and whatever else its modules hold.

    Args:
        model: the model.
        collections: parts of it. The copy has their parameters and buffers themselves, since tables are large. It
            also has what cannot be copied, such as a lock or an open file.

    Raises:
        ModelError: it cannot be copied.
    """
    shared: dict[int, object] = {
        id(each): each for part in collections for each in (*part.parameters(), *part.buffers())
    }
    with suppress(Exception):  # its code may raise anything
        return copy.deepcopy(model, {**shared})
    held = [each for part in model.modules() for name, each in vars(part).items() if name not in _PARTS]
    shared |= {id(each): each for each in held if not _copies(each, shared)}
    try:
        return copy.deepcopy(model, {**shared})
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{type(model).__name__}: cannot be copied (copy.deepcopy): {last_line(error)}") from error


def _copies(value: object, shared: Mapping[int, object]) -> bool:
    try:
        copy.deepcopy(value, {**shared})
    except Exception:  # it may raise anything
        return False
    return True
