"""What a model keeps between calls beside its parameters and buffers."""

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from export.trained.model_copy import MODULE_DICTS
from export.trained.source_location import is_user_code


@dataclass(frozen=True, slots=True)
class StateItem:
    """Something that a model keeps beside its parameters and buffers: a number, a tensor, or a container.

    Attributes:
        owner: what has it: a part of the model, its class or file, an object of the user's own, a dict or a list.
        key: its name there, or its key or place.
        value: it.
        seen: what it was: the number, or a copy of the tensor or container.
    """

    owner: Any
    key: Any
    value: Any
    seen: Any

    def equals(self, other: "StateItem | None") -> bool:
        """Whether it is what it was."""
        if other is None or type(other.seen) is not type(self.seen):
            return False
        if isinstance(self.seen, Tensor):
            is_as_large = self.seen.shape == other.seen.shape and self.seen.dtype == other.seen.dtype
            return is_as_large and torch.allclose(self.seen, other.seen, 0, 0, equal_nan=True)
        if type(self.seen) in _CONTAINERS:
            return len(self.seen) == len(other.seen)
        return bool(self.seen == other.seen)

    def add_calls(self, calls: int) -> None:
        """Have it look as after so many more calls. A container does not get larger than by `_MANY`."""
        if isinstance(self.value, Tensor):
            more = torch.tensor(calls).to(self.value.dtype)  # what does not fit is another number, too
            self._set(self.value + more if self.value.dtype is not torch.bool else ~self.value)
        elif isinstance(self.value, set):
            self.value.update(object() for _ in range(_MANY))
        elif isinstance(self.value, dict):
            self.value.update((object(), None) for _ in range(_MANY))
        elif isinstance(self.value, list | deque):
            self.value.extend([*self.value][-1:] * _MANY)
        else:
            self._set(not self.value if isinstance(self.value, bool) else self.value + calls)

    def restore(self) -> None:
        """Have it be what it was: classes and files are not the copy's alone."""
        if type(self.value) in _CONTAINERS:
            self.value.clear()
            (self.value.update if isinstance(self.value, set | dict) else self.value.extend)(self.seen)
        self._set(self.value)

    def _set(self, value: Any) -> None:
        if isinstance(self.owner, dict | list | deque):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


# More than a container of a model gets larger by.
_MANY = 1_003


# So many things that a model keeps are looked at.
_MOST_HELD = 100_000


_NUMBERS, _CONTAINERS = (int, float, bool), (list, dict, set, deque)


def model_state(model: nn.Module) -> dict[tuple[int, Any], StateItem]:
    """All that a model keeps: in its parts and their classes, in objects of the user's own classes, and in what the
    code of its classes names of its files.
    """
    kinds = dict.fromkeys(kind for part in model.modules() for kind in type(part).__mro__ if _is_own(kind))
    waiting = deque(each for owner in (*model.modules(), *kinds) for each in _items(owner))
    waiting.extend(_named(kinds))
    found: dict[tuple[int, Any], StateItem] = {}
    seen: set[int] = {id(each) for each in (*model.modules(), *kinds)}
    while waiting and len(found) < _MOST_HELD:
        owner, key, value = waiting.popleft()
        is_small = isinstance(value, Tensor) and value.numel() < _MANY and not value.is_meta
        if (is_small or type(value) in (*_NUMBERS, *_CONTAINERS)) and not isinstance(owner, tuple):
            seen_as = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
            found[id(owner), key] = StateItem(owner, key, value, seen_as)
        for each in _holders(value):
            if id(each) not in seen:
                seen.add(id(each))
                waiting.extend(_items(each))
    return found


def _holders(value: Any) -> tuple[Any, ...]:
    """What of a value holds others: containers, the user's functions and classes, and objects with their classes."""
    if isinstance(value, list | dict | deque | tuple):
        return (value,)
    if isinstance(value, FunctionType):
        return (value,) if is_user_code(Path(value.__code__.co_filename)) else ()
    if isinstance(value, type):
        return (value,) if _is_own(value) else ()
    return (value, type(value)) if _is_own(type(value)) else ()


def _items(owner: Any) -> list[tuple[Any, Any, Any]]:
    """What is in something that holds others: itself, with the key and the value of each."""
    if isinstance(owner, list | deque | tuple):
        return [(owner, place, each) for place, each in enumerate(owner)]
    if isinstance(owner, FunctionType):
        kept = [(owner.__defaults__, place, each) for place, each in enumerate(owner.__defaults__ or ())]
        return [*((owner, name, each) for name, each in vars(owner).items()), *kept]
    named = dict(owner if isinstance(owner, dict) else getattr(owner, "__dict__", {}))
    if not isinstance(owner, dict | type):
        given = [vars(kind).get("__slots__", ()) for kind in type(owner).__mro__]
        slots = [name for each in given for name in ((each,) if isinstance(each, str) else each)]
        named |= {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return [(owner, name, each) for name, each in named.items() if name not in MODULE_DICTS]


def _named(kinds: Iterable[type]) -> Iterator[tuple[Any, Any, Any]]:
    """What the code of some classes, and the user's functions that it names, name of their files."""
    waiting = [getattr(each, "__func__", each) for kind in kinds for each in vars(kind).values()]
    seen = set[int]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not is_user_code(Path(function.__code__.co_filename)):
            continue
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                waiting.append(function.__globals__[name])
                yield function.__globals__, name, function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _is_own(kind: type) -> bool:
    """Whether a class is the user's own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (
        file is not None
        and kind.__module__.partition(".")[0] not in sys.stdlib_module_names
        and is_user_code(Path(file))
    )
