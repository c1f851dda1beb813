"""What a model keeps between calls beside its parameters and buffers: counters, caches, globals of its files.

A served request is scored by what it brings alone. So an export changes this state as many calls would, and compares
the model's answers.
"""

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

# By how much `add_calls` grows a container. Larger tensors are not state that counts calls.
_GROWTH = 1_003
_MAX_ITEMS = 100_000
_NUMBERS, _CONTAINERS = (int, float, bool), (list, dict, set, deque)


@dataclass(frozen=True, slots=True)
class StateItem:
    """A number, a tensor, or a container that a model keeps.

    Attributes:
        owner: what holds it: a part of the model, its class or file, an object of a user's class, a dict or a list.
        key: its name, key or index in the owner.
        value: the item itself.
        snapshot: its value when it was recorded: the number, or a copy of the tensor or container.
    """

    owner: Any
    key: Any
    value: Any
    snapshot: Any

    def equals(self, other: "StateItem | None") -> bool:
        """Whether both snapshots are equal. Containers are compared by their length."""
        if other is None or type(other.snapshot) is not type(self.snapshot):
            return False
        if isinstance(self.snapshot, Tensor):
            is_alike = self.snapshot.shape == other.snapshot.shape and self.snapshot.dtype == other.snapshot.dtype
            return is_alike and torch.allclose(self.snapshot, other.snapshot, 0, 0, equal_nan=True)
        if type(self.snapshot) in _CONTAINERS:
            return len(self.snapshot) == len(other.snapshot)
        return bool(self.snapshot == other.snapshot)

    def add_calls(self, calls: int) -> None:
        """Change the item as that many more calls might: add `calls` to a number, and items to a container."""
        if isinstance(self.value, Tensor):
            increment = torch.tensor(calls).to(self.value.dtype)  # it may overflow, which also changes the number
            self._set(self.value + increment if self.value.dtype is not torch.bool else ~self.value)
        elif isinstance(self.value, set):
            self.value.update(object() for _ in range(_GROWTH))
        elif isinstance(self.value, dict):
            self.value.update((object(), None) for _ in range(_GROWTH))
        elif isinstance(self.value, list | deque):
            self.value.extend([*self.value][-1:] * _GROWTH)
        else:
            self._set(not self.value if isinstance(self.value, bool) else self.value + calls)

    def restore(self) -> None:
        """Undo `add_calls`. Classes and files are shared with the user's own model, so this is needed."""
        if type(self.value) in _CONTAINERS:
            self.value.clear()
            (self.value.update if isinstance(self.value, set | dict) else self.value.extend)(self.snapshot)
        self._set(self.value)

    def _set(self, value: Any) -> None:
        if isinstance(self.owner, dict | list | deque):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


def model_state(model: nn.Module) -> dict[tuple[int, Any], StateItem]:
    """All that a model keeps, by the id of the owner and the key.

    It is kept in the model's parts and their classes, in objects of the user's classes, and in the globals that the
    code of these classes names.
    """
    classes = dict.fromkeys(kind for part in model.modules() for kind in type(part).__mro__ if _is_user_class(kind))
    queue = deque(item for owner in (*model.modules(), *classes) for item in _items(owner))
    queue.extend(_globals_in(classes))
    state: dict[tuple[int, Any], StateItem] = {}
    visited: set[int] = {id(owner) for owner in (*model.modules(), *classes)}
    while queue and len(state) < _MAX_ITEMS:
        owner, key, value = queue.popleft()
        is_small = isinstance(value, Tensor) and value.numel() < _GROWTH and not value.is_meta
        if (is_small or type(value) in (*_NUMBERS, *_CONTAINERS)) and not isinstance(owner, tuple):
            snapshot = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
            state[id(owner), key] = StateItem(owner, key, value, snapshot)
        for inner_owner in _owners_in(value):
            if id(inner_owner) not in visited:
                visited.add(id(inner_owner))
                queue.extend(_items(inner_owner))
    return state


def _owners_in(value: Any) -> tuple[Any, ...]:
    """The objects in a value that may hold items: containers, the user's functions and classes, and their objects."""
    if isinstance(value, list | dict | deque | tuple):
        return (value,)
    if isinstance(value, FunctionType):
        return (value,) if is_user_code(Path(value.__code__.co_filename)) else ()
    if isinstance(value, type):
        return (value,) if _is_user_class(value) else ()
    return (value, type(value)) if _is_user_class(type(value)) else ()


def _items(owner: Any) -> list[tuple[Any, Any, Any]]:
    """What an owner holds: (owner, key, value)."""
    if isinstance(owner, list | deque | tuple):
        return [(owner, index, value) for index, value in enumerate(owner)]
    if isinstance(owner, FunctionType):
        attributes = [(owner, name, value) for name, value in vars(owner).items()]
        return attributes + [
            (owner.__defaults__, index, value) for index, value in enumerate(owner.__defaults__ or ())
        ]
    values = dict(owner if isinstance(owner, dict) else getattr(owner, "__dict__", {}))
    if not isinstance(owner, dict | type):
        slots = [vars(kind).get("__slots__", ()) for kind in type(owner).__mro__]
        names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
        values |= {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    return [(owner, name, value) for name, value in values.items() if name not in MODULE_DICTS]


def _globals_in(classes: Iterable[type]) -> Iterator[tuple[Any, Any, Any]]:
    """The globals that the code of some classes names, directly or in the user's functions that it names."""
    waiting = [getattr(value, "__func__", value) for kind in classes for value in vars(kind).values()]
    visited = set[int]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in visited:
            continue
        visited.add(id(function))
        if not is_user_code(Path(function.__code__.co_filename)):
            continue
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                waiting.append(function.__globals__[name])
                yield function.__globals__, name, function.__globals__[name]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_user_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (
        file is not None
        and kind.__module__.partition(".")[0] not in sys.stdlib_module_names
        and is_user_code(Path(file))
    )
