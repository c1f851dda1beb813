"""What of a model's code is put otherwise while torch.export follows it. None of it changes an answer.

Python wants a number where torch.export has a size that may be any: `len(x)`, `int(size)` and `[1] * size` would fix
it to that of the example. torch.export itself cannot tell into how many parts a size is cut, though the size says so.
"""

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.overrides import TorchFunctionMode
from torchrec import KeyedJaggedTensor

from export.trained.keyed import is_users, line_of_stack
from export.trained.running import evaluating, quiet


@contextmanager
def followable(model: nn.Module) -> Iterator[list[tuple[Any, str]]]:
    """In the block, torch.export can follow what it could not.

    Yields:
        Each comparison of sizes that torch.export decides, and the line of the model's code.
    """
    compared: list[tuple[Any, str]] = []
    with ExitStack() as stack:
        for each in (torch.no_grad(), evaluating(model), quiet(), _plain_attention(), _plain_data(), _plain_kjts()):
            stack.enter_context(each)
        stack.enter_context(_any_sizes(model))
        stack.enter_context(_long_lists())
        stack.enter_context(_OfAnySize())
        stack.enter_context(_noting(compared))
        yield compared


@contextmanager
def _noting(compared: list[tuple[Any, str]]) -> Iterator[None]:
    """In the block, note what torch.export finds out about sizes, and the line of the model's code."""
    log_guard = ShapeEnv._log_guard

    def noted(env: Any, prefix: str, guard: Any, *args: Any, **kwargs: Any) -> None:
        compared.append((guard, line_of_stack()))
        log_guard(env, prefix, guard, *args, **kwargs)

    kind: Any = ShapeEnv
    kind._log_guard = noted
    try:
        yield
    finally:
        kind._log_guard = log_guard


@contextmanager
def _plain_data() -> Iterator[None]:
    """In the block, `.data` in the model's code is `.detach()`, which torch.export can follow."""
    kind: Any = torch.Tensor
    plain: Any = torch._C.TensorBase.data

    def data(tensor: Tensor) -> Any:
        return tensor.detach() if is_users(Path(sys._getframe(1).f_code.co_filename)) else plain.__get__(tensor)

    kind.data = property(data, plain.__set__, plain.__delete__)
    try:
        yield
    finally:
        del kind.data


@contextmanager
def _plain_attention() -> Iterator[None]:
    """In the block, nn.TransformerEncoderLayer is the operators that it is made of, not one of its own."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


@contextmanager
def _plain_kjts() -> Iterator[None]:
    """In the block, a KJT does not count its ids by key before somebody asks: torch.export does not know how many."""
    kind: Any = KeyedJaggedTensor
    sync = kind.sync
    kind.sync = lambda kjt: kjt
    try:
        yield
    finally:
        kind.sync = sync


@contextmanager
def _long_lists() -> Iterator[None]:
    """In the block, `[1] * size` is a `ListOfAnyLength` where the size may be any."""
    kind: Any = torch.SymInt
    plain = kind.__mul__, kind.__rmul__

    def by(multiplied: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda size, other: ListOfAnyLength(other, size) if type(other) is list else multiplied(size, other)

    kind.__mul__, kind.__rmul__ = map(by, plain)
    try:
        yield
    finally:
        kind.__mul__, kind.__rmul__ = plain


@contextmanager
def _any_sizes(model: nn.Module) -> Iterator[None]:
    """In the block, `len` and `int` in the model's code answer sizes that may be any as they are."""
    stands_for: Mapping[str, Any] = {"len": _len, "int": _Int}
    changed = [
        (vars(module), name)
        for module in _modules_of(model)
        for name in stands_for.keys() - vars(module).keys() - (_handed_on(module) & {"int"})  # `len` may be handed on
    ]
    for names, name in changed:
        names[name] = stands_for[name]
    try:
        yield
    finally:
        for names, name in changed:
            del names[name]


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """The files of a model's classes, and those whose functions and classes they name. Of installed packages, those
    that the model is from."""
    waiting = [kind.__module__ for part in model.modules() for kind in type(part).__mro__]
    packages = {_package(name) for name in waiting}
    found: dict[str, ModuleType | None] = {}
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        is_near = _package(name) in packages or not {"site-packages", "dist-packages"} & {*Path(path or "").parts}
        is_own = is_near and path and _package(name) not in sys.stdlib_module_names and is_users(Path(path))
        found[name] = module if is_own else None
        if is_own:
            every = [*vars(module).values()]
            named = (getattr(each, "__module__", getattr(each, "__name__", None)) for each in every)
            waiting += [each for each in named if isinstance(each, str)]
    return [module for module in found.values() if module is not None]


def _package(name: str) -> str:
    return name.partition(".")[0]


@cache
def _handed_on(module: ModuleType) -> frozenset[str]:
    """The names that something gets themselves, as torch.zeros(2, dtype=int) does: it looks for that very object."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError, TypeError):
        return frozenset({"len", "int"})  # they may be
    given: list[ast.expr] = []
    for each in ast.walk(tree):
        if isinstance(each, ast.Compare):
            given += [each.left, *each.comparators]
        elif isinstance(each, ast.Call) and not (isinstance(each.func, ast.Name) and each.func.id in _ASKING):
            given += [*each.args, *(keyword.value for keyword in each.keywords)]
    return frozenset(each.id for each in given if isinstance(each, ast.Name))


_ASKING = ("isinstance", "issubclass")


def _len(value: Any) -> Any:
    """As `len`. Of a tensor the size that torch.export has for it."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


class _OfInt(type):
    """Of what stands for `int`: it is asked as `int` is."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.int | torch.SymInt)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, builtins.int)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else 0
        if isinstance(value, Tensor) and not value.dtype.is_floating_point:
            value = value.item()
        return value if isinstance(value, torch.SymInt) else builtins.int(*args, **kwargs)


class _Int(builtins.int, metaclass=_OfInt):
    """As `int`. A size that may be any is an integer already."""


class ListOfAnyLength:
    """A list of Python whose length is a size that may be any. A tensor can be made of it, and nothing else: its
    length, as Python knows it, would be that of the example.

    Args:
        items: what it repeats.
        times: how often.
    """

    def __init__(self, items: list[Any], times: Any) -> None:
        self.items, self.times = items, times

    def __mul__(self, times: Any) -> "ListOfAnyLength":
        return ListOfAnyLength(self.items, self.times * times)

    __rmul__ = __mul__

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a list as long as a batch can be made a tensor, and nothing else: take torch.ones(size)")

    def tensor(self, **kwargs: Any) -> Tensor:
        """As torch.tensor."""
        items = torch.tensor(self.items, **kwargs)
        if items.shape == (1,):
            return torch.full((self.times,), self.items[0], **({"dtype": items.dtype} | kwargs))
        return items.repeat(self.times, *(1 for _ in items.shape[1:]))


class _OfAnySize(TorchFunctionMode):
    """In the block, a tensor that is cut into a known number of equal parts is so by `narrow`. One that is made of a
    list of any length is so by its size."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and len(args) == 1 and isinstance(args[0], ListOfAnyLength):
            return args[0].tensor(**(kwargs or {}))
        read = _CUTS.get(func)
        found = read(*args, **(kwargs or {})) if read is not None and args and isinstance(args[0], Tensor) else None
        return func(*args, **(kwargs or {})) if found is None else found


def _chunks(whole: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...] | None:
    return _parts(whole, whole.shape[dim] // chunks, dim)


def _split(
    whole: Tensor, split_size_or_sections: Any = None, dim: int = 0, **kwargs: Any
) -> tuple[Tensor, ...] | None:
    size = kwargs.get("split_size", split_size_or_sections)
    return _parts(whole, size, dim) if isinstance(size, int | torch.SymInt) else None


def _parts(whole: Tensor, size: Any, dim: int) -> tuple[Tensor, ...] | None:
    """The parts of a tensor, all of a size; None: their number hangs on what the size is, or never does."""
    if not isinstance(whole.shape[dim], torch.SymInt) or not statically_known_true(size > 0):
        return None
    count = whole.shape[dim] // size
    known = count.node.maybe_as_int() if isinstance(count, torch.SymInt) else count
    if known is None or not statically_known_true(known * size == whole.shape[dim]):
        return None
    return tuple(whole.narrow(dim, number * size, size) for number in range(known))


_CUTS: Mapping[Any, Callable[..., tuple[Tensor, ...] | None]] = {
    torch.chunk: _chunks,
    Tensor.chunk: _chunks,
    torch.split: _split,
    torch.functional.split: _split,
    Tensor.split: _split,
}
