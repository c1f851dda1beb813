"""Patches that let torch.export trace more models. None of them changes an answer.

Python wants a number where torch.export has a symbolic size: `len(x)` and `int(size)` would fix it to the size in the
example. torch.export itself cannot tell into how many parts a size is split, although the size says so.
"""

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.overrides import TorchFunctionMode

from export.capture.branch_log import BranchLog, record_branches
from export.capture.model_files import files_of_model, patched
from export.capture.value_checks import Checks, PassedChecks
from export.trained.eval_mode import evaluating, quiet
from export.trained.source_location import current_line, is_user_code


@contextmanager
def traceable(model: nn.Module, checks: Checks, flipped: Collection[int]) -> Iterator[BranchLog]:
    """In the block, torch.export can trace `model`, its `checks` pass, and decisions of the trace are recorded.

    The branches with the indices `flipped` take their other side.
    """
    log = BranchLog()
    with ExitStack() as stack:
        for context in (
            torch.no_grad(),
            evaluating(model),
            quiet(),
            _not_compiling(model),
            _plain_attention(),
            _data_detached(),
            _symbolic_len_and_int(model),
            _TraceableFunctions(log, PassedChecks(checks)),
            record_branches(log, flipped),
        ):
            stack.enter_context(context)
        yield log


@contextmanager
def _not_compiling(model: nn.Module) -> Iterator[None]:
    """In the block, torch.compiler tells the model's code that it is not being exported or compiled."""
    modules = files_of_model(model)
    files = {module.__file__ for module in modules}
    questions = torch.compiler.is_compiling, torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling

    def denied(question: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: sys._getframe(1).f_code.co_filename not in files and question()

    replacements: dict[Any, Any] = {question: denied(question) for question in questions}
    with ExitStack() as stack:
        for module in (torch.compiler, *modules):
            functions = [(name, value) for name, value in vars(module).items() if inspect.isroutine(value)]
            replaced = {name: replacements[value] for name, value in functions if value in replacements}
            stack.enter_context(patched(module, **replaced))
        yield


@contextmanager
def _data_detached() -> Iterator[None]:
    """In the block, `.data` in the model's code is `.detach()`, which torch.export can trace."""
    tensor_class: Any = torch.Tensor
    original: Any = torch._C.TensorBase.data

    def data(tensor: Tensor) -> Any:
        is_own = is_user_code(Path(sys._getframe(1).f_code.co_filename))
        return tensor.detach() if is_own else original.__get__(tensor)

    tensor_class.data = property(data, original.__set__, original.__delete__)
    try:
        yield
    finally:
        del tensor_class.data


@contextmanager
def _plain_attention() -> Iterator[None]:
    """In the block, nn.TransformerEncoderLayer uses its separate operators, not the fused one."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


@contextmanager
def _symbolic_len_and_int(model: nn.Module) -> Iterator[None]:
    """In the block, `len` and `int` in the model's code return symbolic sizes as they are."""
    replacements: Mapping[str, Any] = {"len": _len, "int": _Int}
    patches = [
        (vars(module), name)
        for module in files_of_model(model)
        for name in replacements
        if name not in vars(module) and not (name == "int" and _uses_int_as_object(module))
    ]
    for namespace, name in patches:
        namespace[name] = replacements[name]
    try:
        yield
    finally:
        for namespace, name in patches:
            del namespace[name]


@cache
def _uses_int_as_object(module: ModuleType) -> bool:
    """Whether a file compares `int`, or passes it on: torch.zeros(2, dtype=int) wants that very object."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError, TypeError):
        return True  # it may do so
    expressions: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            expressions += [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            is_type_check = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
            if not is_type_check:
                expressions += [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(isinstance(expression, ast.Name) and expression.id == "int" for expression in expressions)


def _len(value: Any) -> Any:
    """As `len`. Of a tensor, the size that torch.export has for it."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


class _IntType(type):
    """The metaclass of the stand-in for `int`, which answers type checks as `int` does."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.int | torch.SymInt)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, builtins.int)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else 0
        if isinstance(value, Tensor) and not value.dtype.is_floating_point:
            value = value.item()
        return value if isinstance(value, torch.SymInt) else builtins.int(*args, **kwargs)


class _Int(builtins.int, metaclass=_IntType):
    """As `int`, but a symbolic size is an integer already."""


# Modules whose errors the model's code meets only because torch.export traces it.
_EXPORT_MODULES = ("torch._subclasses", "torch.fx", "torch._dynamo", "torch._export", "torch.export")


class _TraceableFunctions(TorchFunctionMode):
    """In the block, some functions of torch accept symbolic sizes.

    Args:
        log: gets the lines of steps that torch.export cannot trace, whose errors the model's code may catch; of loops
            over samples or ids; and of steps that pack sequences.
        checks: of the model's code, which pass.
    """

    def __init__(self, log: BranchLog, checks: PassedChecks) -> None:
        super().__init__()
        self._log, self._checks = log, checks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (passed := self._checks.outcome(func)) is not NotImplemented:
            return passed
        is_unbind = func in (Tensor.unbind, torch.unbind)
        if is_unbind and args[1:] in ((), (0,)) and isinstance(args[0].shape[0], torch.SymInt):
            self._log.loops.append(current_line())
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            self._log.packed.append(current_line())
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and args and isinstance(args[0], Tensor):
            result = replacement(*args, **(kwargs or {}))
            if result is not None:
                return result
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if type(error).__module__.startswith(_EXPORT_MODULES):
                self._log.swallowed.append(current_line())
            raise


def _chunk(whole: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...] | None:
    return _parts(whole, whole.shape[dim] // chunks, dim)


def _split(
    whole: Tensor, split_size_or_sections: Any = None, dim: int = 0, **kwargs: Any
) -> tuple[Tensor, ...] | None:
    size = kwargs.get("split_size", split_size_or_sections)
    return _parts(whole, size, dim) if isinstance(size, int | torch.SymInt) else None


def _parts(whole: Tensor, size: Any, dim: int) -> tuple[Tensor, ...] | None:
    """The parts of a tensor, all of one size. None if their number depends on the size, or the size is a number."""
    if not isinstance(whole.shape[dim], torch.SymInt) or not statically_known_true(size > 0):
        return None
    quotient = whole.shape[dim] // size
    count = quotient.node.maybe_as_int() if isinstance(quotient, torch.SymInt) else quotient
    if count is None or not statically_known_true(count * size == whole.shape[dim]):
        return None
    return tuple(whole.narrow(dim, number * size, size) for number in range(count))


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
    """`functional.batch_norm` in eval mode for a shape that depends on numbers, such as that of the longest sequence.

    torch's own function asks whether the input is empty, which torch.export cannot decide. None for any other input.
    """
    if training or mean is None or var is None or not free_unbacked_symbols(x.shape):
        return None
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    return x * scale.view(shape) + shift.view(shape)


_REPLACEMENTS: Mapping[Any, Callable[..., tuple[Tensor, ...] | Tensor | None]] = {
    nn.functional.batch_norm: _batch_norm,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.split: _split,
    torch.functional.split: _split,
    Tensor.split: _split,
}
