"""What a forward reads that no request brings: clocks, and random numbers of Python and numpy.

A graph holds the values of the export as constants and does not show where they came from. So the model's code is
run, and the calls that read them are recorded with the line of the model's code. Random numbers of torch are nodes of
the graph.
"""

import datetime
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
from torch import nn

from export.capture.model_files import files_of_model
from export.errors import ModelError
from export.trained.source_location import location

# Functions of the module time that read no clock.
_NO_CLOCKS = ("mktime", "sleep", "strptime", "tzset", "get_clock_info")
# Methods of a generator of random numbers that draw none.
_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "generate_state", "spawn", "jumped")
_NUMPYS = (np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_OF_SYSTEM = "the system's"


def expect_no_clocks(model: nn.Module, lines: Sequence[str]) -> None:
    """Refuse a model that reads a clock.

    Args:
        model: the model, for messages.
        lines: the lines of its code that read one.

    Raises:
        ModelError: naming the first line.
    """
    if lines:
        raise ModelError(
            f"{type(model).__name__}: its forward asks for the time{lines[0]}: expected it as a dense input: a graph "
            "has that of the export"
        )


class OutsideReads:
    """What the code of a model reads from elsewhere, in runs of it.

    A generator that a forward makes or seeds itself draws the same numbers in each run. One that continues is found
    by two runs: its state at the beginning of the second differs.

    Args:
        model: it is run, and not followed.

    Attributes:
        clocks: the lines that read one.
        drawn: those that draw random numbers which differ from run to run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.clocks: list[str] = []
        self.drawn: list[str] = []
        self._model = type(model).__name__
        self._own = {module.__file__ for module in files_of_model(model)}
        # Of each generator, which is kept alive for its id: how it began the runs that drew from it.
        self._began: dict[int, tuple[Any, str]] = {}
        self._in_run: set[int] = set()

    @property
    def has_draws(self) -> bool:
        """Whether anything was drawn, which another run may draw otherwise."""
        return bool(self._began)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In the block, the model runs once."""
        self._in_run = set()
        before = sys.getprofile()
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(before)

    def expect_no_draws(self) -> None:
        """Refuse a model that draws random numbers.

        Raises:
            ModelError: naming the line.
        """
        if self.drawn:
            raise ModelError(
                f"{self._model}: its forward draws random numbers in eval mode{self.drawn[0]}: a graph has those of "
                "the export: expected none: draw them `if self.training`, or once, in its __init__"
            )

    def _seen(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if code.co_filename in self._own and (
            (event == "c_call" and _is_clock(called)) or (event == "call" and _names_numpy_s_clock(code))
        ):
            self.clocks.append(location(code.co_filename, frame.f_lineno))
        generator = _drawn_from(frame, called) if event == "c_call" else None
        if event == "call" and _seeds_by_system(frame):
            generator = _OF_SYSTEM
        if generator is not None and (line := self._line(frame)):
            self._note_draw(generator, line)

    def _note_draw(self, generator: Any, line: str) -> None:
        if generator is _OF_SYSTEM:
            self.drawn.append(line)
        elif id(generator) not in self._in_run:
            self._in_run.add(id(generator))
            began = repr(_state_of(generator))
            _, first = self._began.setdefault(id(generator), (generator, began))
            if began != first:
                self.drawn.append(line)

    def _line(self, frame: FrameType | None) -> str:
        """The line of the model's code that makes a call, directly or not. Empty if no line does."""
        while frame is not None:
            if frame.f_code.co_filename in self._own:
                return location(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return ""


def _names_numpy_s_clock(code: CodeType) -> bool:
    """Whether some code says numpy.datetime64("now"). To make an object is no call that Python tells of."""
    return "datetime64" in code.co_names and not {"now", "today"}.isdisjoint(code.co_consts)


def _is_clock(function: Any) -> bool:
    if getattr(function, "__module__", None) == "time":
        return function.__name__ not in _NO_CLOCKS
    kind = getattr(function, "__self__", None)
    is_date = isinstance(kind, type) and issubclass(kind, datetime.date)
    return is_date and function.__name__ in ("now", "today", "utcnow")


def _drawn_from(frame: FrameType, function: Any) -> Any:
    """The generator that a function draws from; None: it draws no random numbers.

    What the system gives to `uuid.uuid4()` is a name, such as that of a request in a log.
    """
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name == "urandom":
        return _OF_SYSTEM if frame.f_code.co_filename == random.__file__ else None
    is_generator = isinstance(owner, (random.Random, *_NUMPYS))
    return owner if is_generator and name not in _NO_DRAWS else None


def _seeds_by_system(frame: FrameType) -> bool:
    """Whether it is `random.Random()`, or `random.seed()`, without a number."""
    code = frame.f_code
    return code.co_filename == random.__file__ and code.co_name == "seed" and frame.f_locals.get("a") is None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return [each.tolist() if isinstance(each, np.ndarray) else each for each in generator.get_state(legacy=True)]
    of = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in _flat(of.state)}


def _flat(state: Any) -> Iterator[tuple[str, Any]]:
    for name, each in state.items():
        if isinstance(each, dict):
            yield from ((f"{name}.{key}", own) for key, own in _flat(each))
        else:
            yield name, each
