"""The example of an export: the arguments of one call of the model, as torch.export takes them.

The leaves of an example are its tensors, KeyedJaggedTensors and JaggedTensors, in dicts, tuples, dataclasses or
objects of any class. A leaf is named by its path, such as `batch.dense_features`. A request brings other leaves;
everything else stays as in the example.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from export.config import Example
from export.errors import ModelError, last_line
from export.trained.module_paths import dotted

# Values without leaves.
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, nn.Module, type)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model.

    Attributes:
        args: the arguments by position.
        kwargs: the arguments by name.
        leaves: the leaves of the arguments, by path.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> "Call":
        """The call with the arguments of an example.

        Raises:
            ModelError: the example does not fit the forward of the model, or has no tensor.
        """
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        try:
            arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ModelError(
                f"example: expected the arguments of one call of {type(model).__name__}: a tuple, or a dict by name: "
                f"{error}"
            ) from error
        path_of_id: dict[int, str] = {}
        leaves = {path: leaf for name, value in arguments.items() for path, leaf in _leaves(name, value, path_of_id)}
        if not leaves:
            raise ModelError("example: expected tensors in it, found none")
        return cls(args, kwargs, leaves)

    def with_leaves(self, leaves: Mapping[str, Any]) -> "Call":
        """A copy of the call on the CPU, in which the leaves at some paths are replaced by others."""
        memo = {id(leaf): leaves[path] if path in leaves else _leaf_copy(leaf) for path, leaf in self.leaves.items()}
        try:
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)), memo)
        except Exception as error:  # the user's classes may raise anything
            raise ModelError(f"example: cannot be copied (copy.deepcopy): {last_line(error)}") from error
        return Call(args, kwargs, {path: memo[id(leaf)] for path, leaf in self.leaves.items()})

    def answer_of(self, model: nn.Module) -> Any:
        """The answer of a model to this call."""
        return model(*self.args, **self.kwargs)


def _leaf_copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().cpu()
    leaf_copy = copy.copy(leaf)
    for name, value in vars(leaf).items():
        if isinstance(value, Tensor):
            setattr(leaf_copy, name, value.detach().clone().cpu())
    if isinstance(leaf_copy, KeyedJaggedTensor):
        leaf_copy._jt_dict = None  # a cache of the original's tensors
    return leaf_copy


def _leaves(path: str, value: Any, path_of_id: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """The leaves in a value with their paths.

    Args:
        path: of the value.
        value: an argument, or a part of one.
        path_of_id: the path of each object that was visited, by its id. It is added to.

    Raises:
        ModelError: a tensor has two paths.
    """
    if isinstance(value, Tensor) and id(value) in path_of_id:
        raise ModelError(
            f"example: {path_of_id[id(value)]!r} and {path!r} are one tensor, and requests bring two: give a copy "
            "(clone())"
        )
    if isinstance(value, _ATOMS) or id(value) in path_of_id:
        return
    path_of_id[id(value)] = path
    if isinstance(value, Tensor | KeyedJaggedTensor | JaggedTensor):
        yield path, value
    elif isinstance(value, KeyedTensor):
        yield from _leaves(path, value.values(), path_of_id)
    else:
        for name, part in _parts(value):
            yield from _leaves(dotted(path, name), part, path_of_id)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The items and attributes of a value, by name."""
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value))
    else:
        slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
        names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
        names = [name for name in names if not name.startswith("__") and hasattr(value, name)]
        yield from ((name, getattr(value, name)) for name in names)
        yield from getattr(value, "__dict__", {}).items()
