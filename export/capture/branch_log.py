"""What torch.export decides while it follows a model: the graph has one of the ways of a forward alone.

Nobody may tell from an answer which way it was. So each decision is noted, with the line of the model's code.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from export.trained.source_location import current_line, is_user_code


@dataclass(frozen=True, slots=True)
class BranchLog:
    """What torch.export decides while it follows a model, with the lines of the model's code.

    Attributes:
        compared: each comparison of sizes that it has to find out.
        asked: each that the model's code does something by, and whether it holds for two samples and more.
        caught: what torch.export could not follow, though the model's code went on, by a `try`.
        clock: where the model's code read the time.
        loops: where it goes through as many as the example has samples, or ids.
        packed: where it packs sequences.
    """

    compared: list[tuple[Any, str]] = field(default_factory=list)
    asked: list[tuple[Any, bool, str]] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)
    clock: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)


@contextmanager
def changed(kind: Any, **methods: Any) -> Iterator[None]:
    """In the block, a class has other methods, or a module other functions."""
    before = {name: vars(kind)[name] for name in methods}
    try:
        for name, method in methods.items():
            setattr(kind, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


@contextmanager
def record_branches(found: BranchLog, otherwise: Collection[int] = ()) -> Iterator[BranchLog]:
    """In the block, note what torch.export finds out about sizes, and what the model's code asks of them.

    Of what it asks, the comparisons with the numbers `otherwise` come out the other way.
    """
    log_guard = ShapeEnv._log_guard

    def noted(self: Any, prefix: str, guard: Any, *args: Any, **kwargs: Any) -> None:
        found.compared.append((guard, current_line()))
        log_guard(self, prefix, guard, *args, **kwargs)

    def asking(is_true: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def asked(value: Any) -> bool:
            question = value if isinstance(value, torch.SymBool) else value != 0
            asks = not isinstance(question, bool) and is_user_code(Path(sys._getframe(1).f_code.co_filename))
            comparison = question.node.expr if asks else None  # before it counts as known
            holds = bool(is_true(value))
            if not asks:
                return holds
            found.asked.append((comparison, holds, current_line()))
            return holds != (len(found.asked) - 1 in otherwise)

        return asked

    index: Callable[[Any], Any] = torch.SymInt.__index__

    def counted(size: Any) -> Any:
        frame = sys._getframe(1)
        if is_user_code(Path(frame.f_code.co_filename)) and "range(" in (line := current_line()):
            found.loops.append(line)
        return index(size)

    kinds: tuple[Any, ...] = torch.SymBool, torch.SymInt, torch.SymFloat
    one, two, three = (changed(kind, __bool__=asking(kind.__bool__)) for kind in kinds)
    loops = changed(torch.SymInt, __index__=counted)
    with changed(ShapeEnv, _log_guard=noted), one, two, three, loops:
        yield found


def symbols_of(shape: Sequence[Any]) -> set[Any]:
    """The symbols of the sizes of a shape."""
    sizes = (each.node.expr for each in shape if isinstance(each, torch.SymInt))
    return {symbol for size in sizes for symbol in size.free_symbols}


def guard_on_ids(samples: Any, sizes: Collection[Any], compared: Sequence[tuple[Any, str]]) -> tuple[Any, str] | None:
    """A comparison that holds for some numbers of ids alone, and its line. None: there is none.

    Two sizes that have to be the same are none: the model itself fails where they are not.

    Args:
        samples: the node of the number of samples.
        sizes: the symbols of the sizes of what is given.
        compared: each comparison that torch.export decided, and its line.
    """
    for known, line in compared:
        guard = samples.shape_env.simplify(known)  # by what else it found out
        decides = guard.free_symbols - samples.expr.free_symbols
        if decides and decides <= {*sizes} and getattr(guard, "rel_op", "") != "==":
            return guard, line
    return None


def branches_on_ids(
    samples: Any, asked: Sequence[tuple[Any, bool, str]], counted: Mapping[Any, Any]
) -> dict[int, str]:
    """The comparisons that the model's code asks for, and that hold for some numbers of ids alone; with their lines.

    Whether there is no id at all does not count: that is one case, which is tried.

    Args:
        samples: the node of the number of samples.
        asked: the comparisons that the model's code does something by.
        counted: sizes that are a multiple of the number of samples for any request: symbol → multiple.
    """
    found = {}
    for number, (question, holds, line) in enumerate(asked):
        comparison = question.xreplace(dict(counted))
        symbols = comparison.free_symbols
        if symbols <= samples.expr.free_symbols or "`assert " in line:
            continue
        any_number = {each: sympy.Symbol(f"{each}_", integer=True, nonnegative=True) + 1 for each in symbols}
        always = comparison.xreplace(any_number)
        if always not in (True, False) or bool(always) != holds:
            found[number] = line
    return found


def modules_of(model: nn.Module) -> list[ModuleType]:
    """The files of a model's classes, and those whose functions and classes they name. Of installed packages, those
    that the model is from. Each once, though `sys.modules` may have it under several names.
    """
    waiting = [kind.__module__ for part in model.modules() for kind in type(part).__mro__]
    packages = {_package(name) for name in waiting}
    found: dict[str, ModuleType | None] = {}
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        is_file = isinstance(path, str) and bool(path)
        is_near = _package(name) in packages or not {"site-packages", "dist-packages"} & {*Path(path or "").parts}
        is_own = (
            is_file and is_near and _package(name) not in sys.stdlib_module_names and is_user_code(Path(path or ""))
        )
        found[name] = module if is_own else None
        if is_own:
            every = [*vars(module).values()]
            named = (getattr(each, "__module__", getattr(each, "__name__", None)) for each in every)
            waiting += [each for each in named if isinstance(each, str)]
    return [*{id(module): module for module in found.values() if module is not None}.values()]


def _package(name: str) -> str:
    return name.partition(".")[0]
