"""One call of a model that works, as torch.export takes it: what of it a request brings, and what stays as it is.

The leaves of an example are its tensors, KeyedJaggedTensors and JaggedTensors, wherever they are: in dicts, tuples,
dataclasses or objects of any class. A leaf is called by its path, such as `batch.dense_features`. A call with other
leaves is a copy of the example, in which each leaf is replaced.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from export.config import Example
from export.errors import ModelError, last_line
from export.trained.module_paths import dotted

# What has nothing in it that a request could bring.
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, nn.Module, type)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model.

    Attributes:
        args: its arguments by position.
        kwargs: its arguments by name.
        leaves: the leaves in them, by path.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> "Call":
        """The call that an example is.

        Raises:
            ModelError: the example does not fit the forward of the model, or has no tensor.
        """
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        try:
            given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ModelError(
                f"example: expected the arguments of one call of {type(model).__name__}: a tuple, or a dict by name: "
                f"{error}"
            ) from error
        seen: dict[int, str] = {}
        leaves = {path: leaf for name, value in given.items() for path, leaf in _leaves(name, value, seen)}
        if not leaves:
            raise ModelError("example: expected tensors in it, found none")
        return cls(args, kwargs, leaves)

    def with_leaves(self, leaves: Mapping[str, Any]) -> "Call":
        """A copy of the call, with other leaves in the places of those that are named. All else is copied, from any
        device to the CPU.
        """
        memo = {id(leaf): leaves[path] if path in leaves else _own(leaf) for path, leaf in self.leaves.items()}
        try:
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)), memo)
        except Exception as error:  # its classes may raise anything
            raise ModelError(f"example: cannot be copied (copy.deepcopy): {last_line(error)}") from error
        return Call(args, kwargs, {path: memo[id(leaf)] for path, leaf in self.leaves.items()})

    def answer_of(self, model: nn.Module) -> Any:
        """What a model answers to it."""
        return model(*self.args, **self.kwargs)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().cpu()
    own = copy.copy(leaf)
    for name, each in vars(leaf).items():
        if isinstance(each, Tensor):
            setattr(own, name, each.detach().clone().cpu())
    if isinstance(own, KeyedJaggedTensor):
        own._jt_dict = None  # made of the tensors of the other
    return own


def _leaves(path: str, value: Any, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """The leaves in a value, each once, with their paths."""
    if isinstance(value, Tensor) and id(value) in seen:
        raise ModelError(
            f"example: {seen[id(value)]!r} and {path!r} are one tensor, and requests bring two: give a copy (clone())"
        )
    if isinstance(value, _ATOMS) or id(value) in seen:
        return
    seen[id(value)] = path
    if isinstance(value, Tensor | KeyedJaggedTensor | JaggedTensor):
        yield path, value
    elif isinstance(value, KeyedTensor):
        yield from _leaves(path, value.values(), seen)
    else:
        for name, part in _parts(value):
            yield from _leaves(dotted(path, name), part, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a value that holds others, by name."""
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(number), part) for number, part in enumerate(value))
    else:
        slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
        yield from getattr(value, "__dict__", {}).items()


def _names(slots: str | Sequence[str]) -> Sequence[str]:
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]
