"""What of a model's code is put otherwise while torch.export follows it. None of it changes an answer.

Python wants a number where torch.export has a size that may be any: `len(x)`, `int(size)` and `[1] * size` would fix
it to that of the example. torch.export itself cannot tell into how many parts a size is cut, though the size says so.
"""

import ast
import builtins
import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.overrides import TorchFunctionMode
from torchrec import KeyedJaggedTensor

from export.capture.branch_log import BranchLog, changed, modules_of, record_branches
from export.capture.value_checks import Checks, PassedChecks
from export.trained.running import evaluating, quiet
from export.trained.source_location import current_line, is_user_code


@contextmanager
def traceable(
    model: nn.Module, checks: Checks, otherwise: Collection[int] = (), later_s: int = 0
) -> Iterator[BranchLog]:
    """In the block, torch.export can follow what it could not, and what is decided meanwhile is noted.

    Its `checks` pass. Of what else the model asks, the comparisons with the numbers `otherwise` come out the other
    way. Its clock is that many seconds ahead.
    """
    noted = BranchLog()
    run_as_is = torch.no_grad(), evaluating(model), quiet(), _as_if_run(model, noted, later_s)
    put_otherwise = _plain_attention(), _plain_data(), _plain_kjts(), _any_sizes(model), _long_lists()
    with ExitStack() as stack:
        for each in (
            *run_as_is,
            *put_otherwise,
            _OfAnySize(noted, PassedChecks(checks)),
            record_branches(noted, otherwise),
        ):
            stack.enter_context(each)
        yield noted


@contextmanager
def _as_if_run(model: nn.Module, noted: BranchLog, later_s: int) -> Iterator[None]:
    """In the block, the model's code is told that it is run, not that torch.export follows it, and a later time."""
    modules = modules_of(model)
    own = {module.__file__ for module in modules}
    asked = torch.compiler.is_compiling, torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling

    def told(ask: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: sys._getframe(1).f_code.co_filename not in own and ask()

    def ahead(clock: Callable[[], Any], by: Any) -> Callable[[], Any]:
        def read() -> Any:
            is_own = sys._getframe(1).f_code.co_filename in own
            noted.clock.extend([current_line()] if is_own else ())
            return clock() + by if is_own else clock()

        return read

    stands_for: dict[Any, Any] = {ask: told(ask) for ask in asked}
    stands_for |= {time.time: ahead(time.time, later_s), time.time_ns: ahead(time.time_ns, later_s * 10**9)}
    with ExitStack() as stack:
        for module in (torch.compiler, time, *modules):
            named = [(name, value) for name, value in vars(module).items() if inspect.isroutine(value)]
            other = {name: stands_for[value] for name, value in named if value in stands_for}
            stack.enter_context(changed(module, **other))
        yield


@contextmanager
def _plain_data() -> Iterator[None]:
    """In the block, `.data` in the model's code is `.detach()`, which torch.export can follow."""
    kind: Any = torch.Tensor
    plain: Any = torch._C.TensorBase.data

    def data(tensor: Tensor) -> Any:
        return tensor.detach() if is_user_code(Path(sys._getframe(1).f_code.co_filename)) else plain.__get__(tensor)

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


def _plain_kjts() -> AbstractContextManager[None]:
    """In the block, a KJT does not count its ids by key before somebody asks: torch.export does not know how many."""
    return changed(KeyedJaggedTensor, sync=lambda kjt: kjt)


def _long_lists() -> AbstractContextManager[None]:
    """In the block, `[1] * size` is a `ListOfAnyLength` where the size may be any."""

    def by(name: str) -> Callable[[Any, Any], Any]:
        multiplied = vars(torch.SymInt)[name]
        return lambda size, other: (
            ListOfAnyLength([([*other], size)]) if type(other) is list else multiplied(size, other)
        )

    return changed(torch.SymInt, **{name: by(name) for name in ("__mul__", "__rmul__")})


@contextmanager
def _any_sizes(model: nn.Module) -> Iterator[None]:
    """In the block, `len` and `int` in the model's code answer sizes that may be any as they are."""
    stands_for: Mapping[str, Any] = {"len": _len, "int": _Int}
    changed = [
        (vars(module), name)
        for module in modules_of(model)
        for name in stands_for.keys() - vars(module).keys() - (_handed_on(module) & {"int"})  # `len` may be handed on
    ]
    for names, name in changed:
        names[name] = stands_for[name]
    try:
        yield
    finally:
        for names, name in changed:
            del names[name]


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
# Where errors are from that a model's code has because it is followed.
_OF_EXPORT = ("torch._subclasses", "torch.fx", "torch._dynamo", "torch._export", "torch.export")


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


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "a list as long as a batch can be made a tensor by torch.tensor, and nothing else: take "
        "torch.ones(size, dtype=torch.int32)"
    )


# What Python asks of any object by itself, or answers in its own way.
_ASKED = (
    "bool", "eq", "ne", "contains", "len", "getitem", "iter", "reversed", "repr", "str", "format", "hash", "iadd",
    "imul", "reduce_ex", "getattr",
)  # fmt: skip
_Refusing: Any = type("_Refusing", (), {f"__{name}__": _refuse for name in _ASKED})


class ListOfAnyLength(_Refusing):  # type: ignore[misc]
    """A list of Python whose length is a size that may be any: `parts`, each with how often it is repeated.

    A tensor can be made of it, and nothing else: whatever else asks would be told of the example.
    """

    def __init__(self, parts: list[tuple[list[Any], Any]]) -> None:
        self.parts = parts

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance asks for
        return _refuse() if is_user_code(Path(sys._getframe(1).f_code.co_filename)) else ListOfAnyLength

    def __mul__(self, times: Any) -> "ListOfAnyLength":
        ((items, count),) = self.parts if len(self.parts) == 1 else _refuse()
        return ListOfAnyLength([(items, count * times)])

    __rmul__ = __mul__

    def __add__(self, other: Any) -> "ListOfAnyLength":
        return ListOfAnyLength([*self.parts, *_parts_of(other)])

    def __radd__(self, other: Any) -> "ListOfAnyLength":
        return ListOfAnyLength([*_parts_of(other), *self.parts])

    def tensor(self, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """As torch.tensor."""
        every = torch.tensor([each for items, _ in self.parts for each in items], dtype=dtype, device=device)
        tensors = [(torch.tensor(items, dtype=every.dtype), times) for items, times in self.parts]
        return torch.cat([each.repeat(times, *(1 for _ in each.shape[1:])) for each, times in tensors])


def _parts_of(other: Any) -> list[tuple[list[Any], Any]]:
    if type(other) is ListOfAnyLength:
        return other.parts
    return [([*other], 1)] if type(other) is list else _refuse()


class _OfAnySize(TorchFunctionMode):
    """In the block, functions of `_OTHERWISE` do what they do in its way, where a size may be any. A tensor that is
    made of a list of any length is so by its size.

    Args:
        noted: gets the line of each step that torch.export cannot follow, whose error the model's code may catch; of
            each that takes samples, or ids, one by one; and of each that packs sequences.
        checks: those of the model's code pass.
    """

    def __init__(self, noted: BranchLog, checks: PassedChecks) -> None:
        super().__init__()
        self._noted, self._checks = noted, checks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and len(args) == 1 and type(args[0]) is ListOfAnyLength:
            return args[0].tensor(**(kwargs or {}))
        if (passed := self._checks.answer(func)) is not NotImplemented:
            return passed
        if func in _ONE_BY_ONE and args[1:] in ((), (0,)) and isinstance(args[0].shape[0], torch.SymInt):
            self._noted.loops.append(current_line())
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            self._noted.packed.append(current_line())
        read = _OTHERWISE.get(func)
        found = read(*args, **(kwargs or {})) if read is not None and args and isinstance(args[0], Tensor) else None
        if found is not None:
            return found
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if type(error).__module__.startswith(_OF_EXPORT):
                self._noted.caught.append(current_line())
            raise


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


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    training: bool,
    eps: float,
    **_: Any,
) -> Tensor | None:
    """`functional.batch_norm` in eval mode, which asks whether there is any number: where there are as many as the
    longest sequence has, nobody knows. None: as it is.
    """
    if training or mean is None or var is None or not free_unbacked_symbols(x.shape):
        return None
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    return x * scale.view(shape) + shift.view(shape)


# They take what is along the first dimension apart.
_ONE_BY_ONE = (Tensor.unbind, torch.unbind)
_OTHERWISE: Mapping[Any, Callable[..., tuple[Tensor, ...] | Tensor | None]] = {
    nn.functional.batch_norm: _batch_norm,
    **dict.fromkeys(
        (torch.chunk, Tensor.chunk), lambda whole, chunks, dim=0: _parts(whole, whole.shape[dim] // chunks, dim)
    ),
    **dict.fromkeys((torch.split, torch.functional.split, Tensor.split), _split),
}
