"""Statements of a model's code that check numbers and change none: `assert …`, and `if …: raise …`.

torch.export cannot trace a condition that depends on the numbers of a request. The outcome of a check is known: it is
the example's, since a request that fails the check has no answer. A graph has no checks.
"""

import ast
import linecache
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from export.capture.example import Call
from export.trained.source_location import is_user_code, location, shortened

# Functions that return a number of Python, which may differ from request to request.
_CONDITIONS = (
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, torch.equal,
    torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero, torch._assert,
)  # fmt: skip
# Functions of torch that check.
_TORCH_CHECKS = ("_assert", "_check", "_check_value", "_check_index", "_check_tensor_all")
_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)
_TRIES = (ast.Try, ast.TryStar)


@dataclass(slots=True)
class Checks:
    """The outcomes of the checks in the example's call.

    Attributes:
        outcomes: in order, by the file, line and column of the check.
        lines: of the checks that a trace took as passed.
    """

    outcomes: dict[tuple[str, int, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[str, None] = field(default_factory=dict)


class RecordedChecks(TorchFunctionMode):
    """In the block, record the outcomes of checks."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        if func in _CONDITIONS and (frame := check_frame()) is not None:
            self._checks.outcomes[_position(frame)].append(outcome)
        return outcome


class PassedChecks:
    """Gives checks the outcomes of the example's call, while a model is traced."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._evaluations: dict[tuple[str, int, int], int] = defaultdict(int)

    def outcome(self, func: Any) -> Any:
        """What a function returns in a check, or NotImplemented outside of checks."""
        frame = check_frame() if func in _CONDITIONS else None
        outcomes = () if frame is None else self._checks.outcomes.get(_position(frame), ())
        if frame is None or not outcomes:
            return NotImplemented
        evaluation = self._evaluations[_position(frame)]
        self._evaluations[_position(frame)] += 1
        self._checks.lines[shortened(location(frame.f_code.co_filename, frame.f_lineno))] = None
        return outcomes[evaluation % len(outcomes)]


def check_frame() -> FrameType | None:
    """The frame of the user's code that is running, if it runs a check whose error no caller may catch."""
    frames = [*_frames()]
    if not frames or not _is_check(*_position(frames[0])):
        return None
    return None if any(_may_catch(*_position(frame)) for frame in frames) else frames[0]


def failed_check(error: BaseException | None) -> bool:
    """Whether an `assert`, a `raise` or a check function of torch in the model's code raised an error."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_user_code(Path(frame.filename))]
    if not user_frames:
        return False
    frame = user_frames[-1]
    statements = _statements_around(frame.filename, frame.lineno or 0, frame.colno or 0)
    statement = statements[0] if statements else None
    if frame is frames[-1]:
        return isinstance(error, AssertionError) or isinstance(statement, ast.Raise)
    return isinstance(statement, ast.Expr) and _calls_check_of_torch(statement)


def _frames() -> Iterator[FrameType]:
    """The frames of the user's code from the inner to the outer one, without those that called the export."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Call.answer_of.__code__:
        if is_user_code(Path(frame.f_code.co_filename)):
            yield frame
        frame = frame.f_back


def _position(frame: FrameType) -> tuple[str, int, int]:
    """The file, line and column that a frame runs. Python may replace the instruction itself by a faster one."""
    positions = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    return frame.f_code.co_filename, positions[0] or frame.f_lineno, positions[2] or 0


@cache
def _is_check(path: str, line: int, column: int) -> bool:
    """Whether some code is in the condition of a check that assigns nothing (`:=`)."""
    inner = next(iter(_statements_around(path, line, column)), None)
    if isinstance(inner, ast.Assert):
        condition: ast.expr = inner.test
    elif isinstance(inner, ast.If) and any(map(_raises, (inner.body, inner.orelse))):
        condition = inner.test
    elif isinstance(inner, ast.Expr) and _calls_check_of_torch(inner):
        condition = inner.value
    else:
        return False
    # Python gives the jump after a condition the position of the whole statement.
    is_in_condition = _covers(condition, line, column) or (line, column) == (inner.lineno, inner.col_offset)
    return is_in_condition and not any(isinstance(node, ast.NamedExpr) for node in ast.walk(condition))


def _raises(block: list[ast.stmt]) -> bool:
    """Whether a block ends by a `raise` and in no other way."""
    return (
        bool(block)
        and isinstance(block[-1], ast.Raise)
        and not any(isinstance(node, _LEAVING) for statement in block for node in ast.walk(statement))
    )


def _calls_check_of_torch(statement: ast.Expr) -> bool:
    if not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _TORCH_CHECKS


@cache
def _may_catch(path: str, line: int, column: int) -> bool:
    """Whether an error that some code raises may be caught in the same function."""
    for statement in _statements_around(path, line, column):
        if isinstance(statement, _TRIES) and statement.handlers:
            if any(_covers(inner, line, column) for inner in statement.body):
                return True
        elif isinstance(statement, ast.With) and any("suppress" in ast.dump(item) for item in statement.items):
            return True
    return False


def _statements_around(path: str, line: int, column: int) -> list[ast.stmt]:
    """The statements that contain some code, from the inner to the outer one."""
    statements = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.stmt))
    return [statement for statement in statements if _covers(statement, line, column)][::-1]


def _covers(node: Any, line: int, column: int) -> bool:
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno, node.end_col_offset)


@cache
def _tree(path: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return ast.Module([], [])
