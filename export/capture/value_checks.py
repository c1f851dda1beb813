"""Statements of a model's code that check numbers and change none: `assert …`, and `if …: raise …`.

torch.export cannot follow a question that the numbers of a request decide. Of a check the answer is known: it is the
one that the example passed by, since a request that does not pass has no answer. A graph has no checks.
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

# What answers with a number of Python, which may be another one for each request.
_ASKING = (
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, torch.equal,
    torch.allclose, Tensor.equal, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero, torch._assert,
)  # fmt: skip
# Functions of torch that check.
_TORCHS = ("_assert", "_check", "_check_value", "_check_index", "_check_tensor_all")
_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)
_BLOCKS = (ast.Try, ast.TryStar)


@dataclass(slots=True)
class Checks:
    """What the example's call answered to the questions of checks, by the place that asks: in order.

    Attributes:
        answers: by file, line and column.
        lines: of the checks that were followed as passed.
    """

    answers: dict[tuple[str, int, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[str, None] = field(default_factory=dict)


class RecordedChecks(TorchFunctionMode):
    """In the block, note what checks are answered."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func in _ASKING and (asking := asking_check()) is not None:
            self._checks.answers[_place(asking)].append(answer)
        return answer


class PassedChecks:
    """Answers the questions of checks as in the example's call, while a model is followed."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._asked: dict[tuple[str, int, int], int] = defaultdict(int)

    def answer(self, func: Any) -> Any:
        """What a function answers in a check; NotImplemented: it is asked elsewhere."""
        asking = asking_check() if func in _ASKING else None
        answers = () if asking is None else self._checks.answers.get(_place(asking), ())
        if asking is None or not answers:
            return NotImplemented
        number = self._asked[_place(asking)]
        self._asked[_place(asking)] += 1
        self._checks.lines[shortened(location(asking.f_code.co_filename, asking.f_lineno))] = None
        return answers[number % len(answers)]


def asking_check() -> FrameType | None:
    """The frame of the user's code that is running, if it is in a check that nothing around it may catch."""
    frames = [*_frames()]
    if not frames or not _is_check(*_place(frames[0])) or any(_may_catch(*_place(each)) for each in frames):
        return None
    return frames[0]


def failed_check(error: BaseException | None) -> bool:
    """Whether an `assert`, a `raise` or a check function of torch in the model's code raised an error."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_user_code(Path(frame.filename))]
    if not user_frames:
        return False
    frame = user_frames[-1]
    statements = _around(frame.filename, frame.lineno or 0, frame.colno or 0)
    statement = statements[0] if statements else None
    if frame is frames[-1]:
        return isinstance(error, AssertionError) or isinstance(statement, ast.Raise)
    return isinstance(statement, ast.Expr) and _calls_check_of_torch(statement)


def _frames() -> Iterator[FrameType]:
    """The frames of the user's code, from the inner one to the outer one; without those that called the export."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Call.answer_of.__code__:
        if is_user_code(Path(frame.f_code.co_filename)):
            yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> tuple[str, int, int]:
    """The file, line and column of what a frame is doing. Its instruction may change: Python puts faster ones."""
    positions = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    return frame.f_code.co_filename, positions[0] or frame.f_lineno, positions[2] or 0


@cache
def _is_check(path: str, line: int, column: int) -> bool:
    """Whether some code is of the condition of a check, which keeps nothing (`:=`)."""
    inner = next(iter(_around(path, line, column)), None)
    if isinstance(inner, ast.Assert):
        condition: ast.expr = inner.test
    elif isinstance(inner, ast.If) and any(map(_raises, (inner.body, inner.orelse))):
        condition = inner.test
    elif isinstance(inner, ast.Expr) and _calls_check_of_torch(inner):
        condition = inner.value
    else:
        return False
    # The jump that asks counts as the whole statement.
    is_asking = _covers(condition, line, column) or (line, column) == (inner.lineno, inner.col_offset)
    return is_asking and not any(isinstance(e, ast.NamedExpr) for e in ast.walk(condition))


def _raises(block: list[ast.stmt]) -> bool:
    """Whether a block ends in an error, and nowhere else."""
    return (
        bool(block)
        and isinstance(block[-1], ast.Raise)
        and not any(isinstance(part, _LEAVING) for each in block for part in ast.walk(each))
    )


def _calls_check_of_torch(statement: ast.Expr) -> bool:
    if not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _TORCHS


@cache
def _may_catch(path: str, line: int, column: int) -> bool:
    """Whether an error that some code raises may be caught in the same function."""
    return any(
        (isinstance(each, _BLOCKS) and each.handlers and any(_covers(part, line, column) for part in each.body))
        or (isinstance(each, ast.With) and "suppress" in "".join(ast.dump(item) for item in each.items))
        for each in _around(path, line, column)
    )


def _around(path: str, line: int, column: int) -> list[ast.stmt]:
    """The statements that have some code in them, from the inner one to the outer one."""
    found = [each for each in ast.walk(_tree(path)) if isinstance(each, ast.stmt) and _covers(each, line, column)]
    return found[::-1]


def _covers(node: Any, line: int, column: int) -> bool:
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno, node.end_col_offset)


@cache
def _tree(path: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return ast.Module([], [])
