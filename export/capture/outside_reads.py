"""What a forward reads that no request brings: clocks, and random numbers of Python and numpy.

A graph holds such values as constants of the export, without their origin. So the model's code is run, and the calls
that read them are recorded with their line. Random numbers of torch are nodes of the graph instead.
"""

import cProfile
import datetime
import gc
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
_NO_DRAWS = ("seed", "getstate", "setstate")
_NUMPYS = (np.random.RandomState, np.random.Generator)
_SYSTEM = "the system's"


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
            f"{type(model).__name__}: its forward reads the time{lines[0]}, which a graph would fix at the time "
            "of the export: expected it as a dense input"
        )


class OutsideReads:
    """Records the clocks and random numbers that the code of a model reads while it runs.

    A generator that the forward makes or seeds itself draws the same numbers in every run. A generator that continues
    has another state at the beginning of the second run.

    Args:
        model: the model.

    Attributes:
        clocks: the lines that read a clock.
        draws: the lines that draw random numbers which differ from run to run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.clocks: list[str] = []
        self.draws: list[str] = []
        self._model = type(model).__name__
        self._files = {module.__file__ for module in files_of_model(model)}
        # By the id of each generator: the generator, so that the id stays valid, and its state at its first draw: of
        # Python's before the draw, of numpy's after it.
        self._first_states: dict[int, tuple[Any, str]] = {}
        self._drawn_in_run: set[int] = set()
        self._numpy_states: list[tuple[Any, str]] = []
        self._lines: dict[FrameType, str] = {}

    @property
    def has_draws(self) -> bool:
        """Whether a generator was drawn from, so that a second run is needed."""
        return bool(self._first_states)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In the block, the model is run once."""
        self._drawn_in_run = set()
        self._numpy_states = [(generator, repr(_state_of(generator))) for generator in _numpy_generators()]
        profile, trace = sys.getprofile(), sys.gettrace()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(trace)
            sys.setprofile(profile if callable(profile) else None)
            if isinstance(profile, cProfile.Profile):  # a profiler in C, which sys.setprofile cannot set
                profile.enable()
            self._lines.clear()

    def expect_no_draws(self) -> None:
        """Refuse a model that draws random numbers.

        Raises:
            ModelError: naming the line.
        """
        if self.draws:
            raise ModelError(
                f"{self._model}: its forward draws random numbers in eval mode{self.draws[0]}, which a graph would "
                "fix at those of the export: draw them `if self.training`, or once, in its __init__"
            )

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if code.co_filename in self._files and (
            (event == "c_call" and _is_clock(called)) or (event == "call" and _reads_numpy_clock(code))
        ):
            self.clocks.append(location(code.co_filename, frame.f_lineno))
        generator = _generator_of(frame, called) if event == "c_call" else None
        if event == "call" and _seeds_from_system(frame):
            generator = _SYSTEM
        if generator is not None and (line := self._line(frame)):
            self._record_draw(generator, line)

    def _record_draw(self, generator: Any, line: str) -> None:
        if generator is _SYSTEM:
            self.draws.append(line)
        elif id(generator) not in self._drawn_in_run:
            self._drawn_in_run.add(id(generator))
            state = repr(_state_of(generator))
            _, first_state = self._first_states.setdefault(id(generator), (generator, state))
            if state != first_state:
                self.draws.append(line)

    def _trace(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Trace the lines of the model's code. numpy 2 does not tell profilers of a draw: its states show it."""
        return self._trace_line if frame.f_code.co_filename in self._files else None

    def _trace_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        line = self._lines.get(frame) or self._line(frame.f_back)
        for index, (generator, last_state) in enumerate(self._numpy_states):
            if (state := repr(_state_of(generator))) != last_state:
                self._numpy_states[index] = generator, state
                self._record_draw(generator, line)
        if event == "return":
            self._lines.pop(frame, None)
        else:
            self._lines[frame] = location(frame.f_code.co_filename, frame.f_lineno)
        return self._trace_line

    def _line(self, frame: FrameType | None) -> str:
        """The line of the model's code that makes a call, directly or not, or ""."""
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                return location(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return ""


def _reads_numpy_clock(code: CodeType) -> bool:
    """Whether some code contains numpy.datetime64("now"). Python does not report the construction of an object."""
    return "datetime64" in code.co_names and not {"now", "today"}.isdisjoint(code.co_consts)


def _is_clock(function: Any) -> bool:
    if getattr(function, "__module__", None) == "time":
        return function.__name__ not in _NO_CLOCKS
    kind = getattr(function, "__self__", None)
    is_date = isinstance(kind, type) and issubclass(kind, datetime.date)
    return is_date and function.__name__ in ("now", "today", "utcnow")


def _generator_of(frame: FrameType, function: Any) -> Any:
    """The generator that a function draws from, or None.

    Bytes of the system for `uuid.uuid4()` do not count: they make a name, such as that of a request in a log.
    """
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name == "urandom":
        return _SYSTEM if frame.f_code.co_filename == random.__file__ else None
    return owner if isinstance(owner, random.Random) and name not in _NO_DRAWS else None


def _numpy_generators() -> list[Any]:
    """The generators of numpy in this process."""
    return [generator for generator in gc.get_objects() if issubclass(type(generator), _NUMPYS)]


def _seeds_from_system(frame: FrameType) -> bool:
    """Whether a frame runs `random.Random()` or `random.seed()` without a seed."""
    code = frame.f_code
    return code.co_filename == random.__file__ and code.co_name == "seed" and frame.f_locals.get("a") is None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _as_lists(generator.get_state(legacy=True))
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return _as_lists(bits.state)


def _as_lists(state: Any) -> Any:
    """A state with lists instead of arrays, whose repr is not shortened."""
    if isinstance(state, dict):
        return {name: _as_lists(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return [_as_lists(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray) else state
