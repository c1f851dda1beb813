"""The trained model behind its collections: a copy of it is run on embeddings that are given to it."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.types import CacheMixin

from export.capture.answering import Collections, Columns, answering, dtype_of, jagged_tensors, keyed_tensor
from export.capture.given import Given
from export.capture.noted import NO_TIME, reading_clocks
from export.errors import ModelError, ParityError, last_line
from export.scores.cut import WAY_OUT, Cut
from export.trained.keyed import is_users
from export.trained.managed import is_sequence, takes_weights
from export.trained.running import copied, evaluating, quiet


@contextmanager
def model_errors(model: nn.Module, what: str, said: Callable[[Exception], str] = last_line) -> Iterator[None]:
    """Refuse `model` for any error in here.

    Args:
        model: the model.
        what: what it cannot do.
        said: the line of the error for the message.

    Raises:
        ModelError: naming the model, what it cannot do, what the error said, and the way out.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # its code may raise anything
        raise ModelError(f"{type(model).__name__}: {what}: {said(error)}: {WAY_OUT}") from error


def answers_behind(
    model: nn.Module,
    found: Cut,
    weights: fx.GraphModule,
    collections: Collections,
    probes: Sequence[Given],
    others: Sequence[Given] = (),
) -> list[dict[str, Tensor] | None]:
    """What a model answers by its own forward, where its collections answer with embeddings and rows that are given.

    Args:
        model: the model. A copy of it is run, with the weights that serve.
        found: what was cut out of it.
        weights: what was cut out, with the weights that serve.
        collections: of the model.
        probes: what is given.
        others: what may be given, and some models cannot be run on.

    Returns:
        Float32 [B, …] by output, for each probe, then for each of the others; None: it cannot be run on it.

    Raises:
        ModelError: it cannot be run on a probe, answers with something else, or changes a buffer.
        ParityError: it gives a collection other ids than those that are given.
    """
    own = copied(model, collections)
    columns = {
        own.get_submodule(name): collections[each] for name, each in model.named_modules() if each in collections
    }
    _take_weights(own, weights)
    before = {name: each.clone() for name, each in _buffers(own, columns)}
    watched: AbstractContextManager[list[str]] = nullcontext([]) if found.is_timeless else reading_clocks(own)
    with watched as clocks:
        answers: list[dict[str, Tensor] | None] = [_answer_behind(own, found, columns, probe) for probe in probes]
    if clocks:
        raise ModelError(f"{type(model).__name__}: its forward asks for the time{clocks[0]}: expected {NO_TIME}")
    _expect_no_count(own, answers[0], lambda: _answer_behind(own, found, columns, probes[0]))
    for other in others:
        try:
            answers.append(_answer_behind(own, found, columns, other))
        except ModelError:
            answers.append(None)
    for name, each in _buffers(own, columns):
        if not torch.equal(each, before[name]):
            raise ModelError(
                f"{type(model).__name__}: its forward changes the buffer {name!r}: requests are scored by what they "
                f"bring alone: {WAY_OUT}"
            )
    return answers


@dataclass(frozen=True, slots=True)
class _Held:
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

    def is_as(self, other: "_Held | None") -> bool:
        """Whether it is what it was."""
        if other is None or type(other.seen) is not type(self.seen):
            return False
        if isinstance(self.seen, Tensor):
            is_as_large = self.seen.shape == other.seen.shape and self.seen.dtype == other.seen.dtype
            return is_as_large and torch.allclose(self.seen, other.seen, 0, 0, equal_nan=True)
        if type(self.seen) in _CONTAINERS:
            return len(self.seen) == len(other.seen)
        return bool(self.seen == other.seen)

    def count_on(self) -> None:
        """Have it look as after many more calls."""
        if isinstance(self.value, Tensor):
            self._set(self.value + _MANY if self.value.dtype is not torch.bool else ~self.value)
        elif isinstance(self.value, set):
            self.value.update(object() for _ in range(_MANY))
        elif isinstance(self.value, dict):
            self.value.update((object(), None) for _ in range(_MANY))
        elif isinstance(self.value, list | deque):
            self.value.extend([*self.value][-1:] * _MANY)
        else:
            self._set(not self.value if isinstance(self.value, bool) else self.value + _MANY)

    def put_back(self) -> None:
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


_MANY = 1_003
# So many things that a model keeps are looked at.
_MOST_HELD = 100_000
_NUMBERS, _CONTAINERS = (int, float, bool), (list, dict, set, deque)
# Where a module keeps what is compared otherwise.
_TENSORS = ("_parameters", "_buffers", "_modules")


def _held(model: nn.Module) -> dict[tuple[int, Any], _Held]:
    """All that a model keeps: in its parts and their classes, in objects of the user's own classes, and in what the
    code of its classes names of its files.
    """
    kinds = dict.fromkeys(kind for part in model.modules() for kind in type(part).__mro__ if _is_own(kind))
    waiting = deque(each for owner in (*model.modules(), *kinds) for each in _items(owner))
    waiting.extend(_named(kinds))
    found: dict[tuple[int, Any], _Held] = {}
    seen: set[int] = {id(each) for each in (*model.modules(), *kinds)}
    while waiting and len(found) < _MOST_HELD:
        owner, key, value = waiting.popleft()
        is_small = isinstance(value, Tensor) and value.numel() < _MANY and not value.is_meta
        if (is_small or type(value) in (*_NUMBERS, *_CONTAINERS)) and not isinstance(owner, tuple):
            seen_as = value.detach().clone() if isinstance(value, Tensor) else copy(value)
            found[id(owner), key] = _Held(owner, key, value, seen_as)
        has_more = isinstance(value, list | dict | deque | tuple) or _is_own(
            value if isinstance(value, type) else type(value)
        )
        if has_more and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_items(value))
    return found


def _items(owner: Any) -> list[tuple[Any, Any, Any]]:
    """What is in something that holds others: itself, with the key and the value of each."""
    if isinstance(owner, list | deque | tuple):
        return [(owner, place, each) for place, each in enumerate(owner)]
    named = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    return [(owner, name, each) for name, each in named.items() if name not in _TENSORS]


def _named(kinds: Iterable[type]) -> Iterator[tuple[Any, Any, Any]]:
    """What the code of some classes, and the user's functions that it names, name of their files."""
    waiting = [getattr(each, "__func__", each) for kind in kinds for each in vars(kind).values()]
    seen = set[int]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not is_users(Path(function.__code__.co_filename)):
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
        file is not None and kind.__module__.partition(".")[0] not in sys.stdlib_module_names and is_users(Path(file))
    )


def _expect_no_count(
    model: nn.Module, answer: Mapping[str, Tensor] | None, again: Callable[[], Mapping[str, Tensor]]
) -> None:
    """Refuse a model that counts its calls, and answers otherwise after many of them.

    What it keeps of a call is settled by now. What one more call changes is a count.

    Args:
        model: a copy, which was called.
        answer: to a probe.
        again: calls it with that probe.
    """
    before = _held(model)
    if answer is None or not _are_alike(answer, again()):
        return  # no two of its answers are the same: other checks say why
    changed = [each for key, each in _held(model).items() if not each.is_as(before.get(key))]
    for each in changed:
        each.count_on()
    try:
        is_same = not changed or _are_alike(answer, again())
    except ModelError:
        is_same = False
    finally:
        for each in changed:
            each.put_back()
    if not is_same:
        names = [each.key for each in changed if isinstance(each.key, str)] or ["a number that it keeps"]
        raise ModelError(
            f"{type(model).__name__}: its forward changes {names[0]!r}, and answers by it: requests are scored by "
            f"what they bring alone: {WAY_OUT}"
        )


def _are_alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.allclose(each, other[name], 0, 0, equal_nan=True) for name, each in one.items())


def _answer_behind(model: nn.Module, found: Cut, collections: Collections, given: Given) -> dict[str, Tensor]:
    wrong: list[str] = []

    def answer(collection: nn.Module, columns: Columns, ids: KeyedJaggedTensor) -> Any:
        wrong.extend(_others(collection, columns, ids, given))
        dtype = dtype_of(collection)
        if is_sequence(collection):
            return jagged_tensors(columns, ids, {name: each.clone() for name, each in given.rows.items()}, dtype)
        return keyed_tensor(columns, given.embeddings.to(dtype, copy=True))

    what = f"its forward fails for embeddings and dense inputs [{given.samples}, width]"
    with torch.no_grad(), evaluating(model), quiet(), answering(collections, answer), model_errors(model, what):
        answered = {name: each.float() for name, each in found.answer(model, given.copied()).items()}
    if wrong:
        raise ParityError(
            f"{type(model).__name__}: gives a collection ids, lengths or weights of key {wrong[0]!r} that are not "
            "those of the request: lookups would not see it: do it before the model"
        )
    return answered


def _others(collection: nn.Module, columns: Columns, ids: KeyedJaggedTensor, given: Given) -> Iterator[str]:
    """The keys of which a collection looks up something else than is given."""
    found = ids.to_dict()  # as collections do
    for key in columns.keys:
        bag, own = given.bags.get(key), found[key]
        if bag is None:
            continue
        is_same = torch.equal(own.values().long(), bag.ids.long())
        if key not in given.fixed:
            is_same &= torch.equal(own.lengths().long(), bag.lengths.long())
        if takes_weights(collection) and bag.weights is not None:
            is_same &= torch.equal(own.weights().float(), bag.weights.float())
        if not is_same:
            yield key


def _take_weights(model: nn.Module, weights: fx.GraphModule) -> None:
    """Give a model the parameters and buffers of what was cut out of it, which have the same names."""
    for name, each in [*weights.named_parameters(), *weights.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        held: Any = owner._parameters if leaf in owner._parameters else owner._buffers
        if leaf in held:
            held[leaf] = each


def _buffers(model: nn.Module, collections: Collections) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a model outside of its collections, and of modules that keep what they computed of a batch."""
    caches = (each for each in model.modules() if isinstance(each, CacheMixin))
    inside = {id(each) for part in (*collections, *caches) for each in part.buffers()}
    yield from ((name, each) for name, each in model.named_buffers() if id(each) not in inside and not each.is_meta)
