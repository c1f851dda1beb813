"""Record the decisions of torch.export while it traces a model: the graph has only one side of each branch.

The graph does not show which side was taken, so every decision is recorded with the line of the model's code.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from export.capture.model_files import patched
from export.capture.value_checks import check_frame
from export.trained.source_location import current_line, is_user_code


@dataclass(frozen=True, slots=True)
class Branch:
    """A comparison of sizes that decides what the model's code does.

    Attributes:
        comparison: as sympy has it.
        holds: its outcome for two samples and more.
        line: of the model's code.
    """

    comparison: Any
    holds: bool
    line: str


@dataclass(frozen=True, slots=True)
class BranchLog:
    """The decisions of torch.export in one trace, with the lines of the model's code.

    Attributes:
        guards: the comparisons of sizes that torch.export had to decide.
        branches: the comparisons on which the model's code branched.
        swallowed: steps that torch.export cannot trace, whose errors the model's code may have caught.
        loops: loops over the samples, or ids, of the example.
        packed: calls that pack sequences.
    """

    guards: list[tuple[Any, str]] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    swallowed: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)


@contextmanager
def record_branches(log: BranchLog, flipped: Collection[int] = ()) -> Iterator[BranchLog]:
    """In the block, record what torch.export decides about sizes, and how the model's code branches on them.

    Checks, which only raise an error, are not recorded as branches.

    Args:
        log: gets the decisions.
        flipped: the indices of branches that take their other side.
    """
    log_guard = ShapeEnv._log_guard
    index: Callable[[Any], Any] = torch.SymInt.__index__

    def logged(self: Any, prefix: str, guard: Any, *args: Any, **kwargs: Any) -> None:
        log.guards.append((guard, current_line()))
        log_guard(self, prefix, guard, *args, **kwargs)

    def recorded_bool(is_true: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def to_bool(value: Any) -> bool:
            condition = value if isinstance(value, torch.SymBool) else value != 0
            if isinstance(condition, bool) or not is_user_code(Path(sys._getframe(1).f_code.co_filename)):
                return bool(is_true(value))
            comparison = condition.node.expr  # before the outcome is known, which would replace it
            holds = bool(is_true(value))
            if check_frame() is not None:
                return holds
            log.branches.append(Branch(comparison, holds, current_line()))
            return holds != (len(log.branches) - 1 in flipped)

        return to_bool

    def recorded_index(size: Any) -> Any:
        if is_user_code(Path(sys._getframe(1).f_code.co_filename)) and "range(" in (line := current_line()):
            log.loops.append(line)
        return index(size)

    kinds: tuple[Any, ...] = torch.SymBool, torch.SymInt, torch.SymFloat
    with ExitStack() as stack:
        stack.enter_context(patched(ShapeEnv, _log_guard=logged))
        for kind in kinds:
            stack.enter_context(patched(kind, __bool__=recorded_bool(kind.__bool__)))
        stack.enter_context(patched(torch.SymInt, __index__=recorded_index))
        yield log


def symbols_of(shape: Sequence[Any]) -> set[Any]:
    """The symbols of the sizes of a shape."""
    expressions = (size.node.expr for size in shape if isinstance(size, torch.SymInt))
    return {symbol for expression in expressions for symbol in expression.free_symbols}


def guard_on_ids(samples: Any, sizes: Collection[Any], guards: Sequence[tuple[Any, str]]) -> tuple[Any, str] | None:
    """The first guard that holds for some numbers of ids only, with its line, or None.

    A guard that two sizes are equal does not count: the model itself fails where they differ.

    Args:
        samples: the node of the number of samples.
        sizes: the symbols of the sizes of the inputs.
        guards: the comparisons that torch.export decided, with their lines.
    """
    for comparison, line in guards:
        guard = samples.shape_env.simplify(comparison)  # by the other guards
        symbols = guard.free_symbols - samples.expr.free_symbols
        if symbols and symbols <= {*sizes} and getattr(guard, "rel_op", "") != "==":
            return guard, line
    return None


def branches_on_one_sample(samples: Any, branches: Sequence[Branch]) -> list[int]:
    """The indices of branches that take the other side for one sample. The graph is for two samples and more.

    Args:
        samples: the node of the number of samples.
        branches: of the model's code.
    """
    indices = []
    for index, branch in enumerate(branches):
        for_one = samples.shape_env.replace(branch.comparison).xreplace({samples.expr: 1})
        if for_one in (True, False) and bool(for_one) != branch.holds:
            indices.append(index)
    return indices


def branches_on_ids(samples: Any, branches: Sequence[Branch], multiples: Mapping[Any, Any]) -> list[int]:
    """The indices of branches whose side depends on the number of ids.

    A branch for no id at all does not count: it is one case, which the export tries.

    Args:
        samples: the node of the number of samples.
        branches: of the model's code.
        multiples: sizes that are a multiple of the number of samples in every request: symbol → multiple.
    """
    indices = []
    for index, branch in enumerate(branches):
        comparison = branch.comparison.xreplace(dict(multiples))
        symbols = comparison.free_symbols
        if symbols <= samples.expr.free_symbols:
            continue
        positive = {symbol: sympy.Symbol(f"{symbol}_", integer=True, nonnegative=True) + 1 for symbol in symbols}
        outcome = comparison.xreplace(positive)
        if outcome not in (True, False) or bool(outcome) != branch.holds:
            indices.append(index)
    return indices
