"""The log of a server: a line for each event, as text or JSON, with the time, the level and the model.

`tbe-serve run` logs its own events, and converts the output of tritonserver and its models to the same form. The
format of tritonserver's log was tested with Triton 24.10. According to its source, 26.04 has the same format.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from serving.errors import ConfigurationError

# Fields of a record beside its message. `event` is one word for what happened, or the line of Triton's code.
_ABOUT = ("event", "host", "model", "version", "lineage", "sequence", "sha256")
_CONTROL = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]+\s*")


class LogFormat(StrEnum):
    """How an event is written."""

    TEXT = "text"
    JSON = "json"


def server_log(path: Path | None = None, form: LogFormat = LogFormat.TEXT, host: int | None = None) -> logging.Logger:
    """A log of a server, without colours.

    Args:
        path: the file, which is emptied, and which only its own user can read. None stands for stderr.
        form: text, `TIME LEVEL SOURCE EVENT: MESSAGE`, or JSON objects with these fields, and with `model`, `version`
            and `host` if the event is about one. The time is UTC, as in RFC 3339.
        host: the number of the router's host that the server serves.

    Raises:
        ConfigurationError: the file cannot be made or written to.
    """
    log = logging.Logger("tbe-serve")
    handler = _Handler(_sink(path))
    handler.setFormatter(_Form(form, host))
    log.addHandler(handler)
    return log


def close_log(log: logging.Logger) -> None:
    """Close the file of a log. Later records are lost."""
    for handler in log.handlers:
        handler.close()


def _sink(path: Path | None) -> BinaryIO:
    if path is None:
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError):  # notebooks replace stderr by another object
            number = 2
        return open(number, "wb", buffering=0, closefd=False)
    try:
        return open(path, "wb", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))
    except OSError as error:
        raise ConfigurationError(f"{path}: expected a file that a log can be written to: {error.strerror}") from error


def one_line(text: str) -> str:
    """A text as one line, without control characters: they break lines or move the terminal's cursor."""
    return _CONTROL.sub(" ", text.strip())


class _Handler(logging.Handler):
    """Writes each record by one call, so that lines of several processes do not mix."""

    def __init__(self, sink: BinaryIO) -> None:
        super().__init__()
        self._sink = sink

    def close(self) -> None:
        self._sink.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # the disk is full, or the reader has ended: the server continues
            self._sink.write(f"{self.format(record)}\n".encode(errors="replace"))


class _Form(logging.Formatter):
    def __init__(self, form: LogFormat, host: int | None) -> None:
        super().__init__()
        self._form, self._host = form, host

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{seconds}.{int(record.msecs):03}Z", "level": record.levelname, "source": record.name}
        about: dict[str, Any] = {"host": self._host, **vars(record)}
        about = {name: about[name] for name in _ABOUT if about.get(name) is not None}
        message = record.getMessage()
        if self._form is LogFormat.JSON:
            return json.dumps({**head, **about, "message": message})
        host = f"host {self._host}: " if self._host is not None else ""
        line = f"{' '.join(head.values())} {about.get('event', 'said')}: {host}{message}"
        return one_line(line)


# A line of tritonserver's log: level, day, time, process, and the line of code; then the text, quoted or not.
_TRITON = re.compile(r"([IWEF])\d{4} [\d:.]+ \d+ ([^\]]+)\] (.*)")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
# Colours in the output of libraries; and the error that tritonserver logs on machines without a GPU.
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
NO_GPU = "CudaDriverHelper"
_OF_MODEL = re.compile(r"\[(\w+) (.+?)/(\d+)\] (.*)", re.DOTALL)


def about_model(log: Callable[[str], None], event: str, model: str, version: str) -> Callable[[str], None]:
    """A function that logs by Triton's logger in a model's process, in the form that `triton_record` reads.

    Args:
        log: a method of Triton's `pb_utils.Logger`.
        event: one word for what happened.
        model: the name of the model.
        version: the version of the model.
    """
    return lambda message: log(f"[{event} {model}/{version}] {message}")


class Sampled:
    """Logs an event that may be frequent: the first one, and then at most one every 10 s with the number of events.

    Args:
        log: writes a line.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._count, self._next = 0, 0.0

    def __call__(self, message: str, count: int = 1) -> None:
        """Count events, and log the message if none was logged in the last 10 s. Long messages are cut."""
        self._count += count
        if (now := time.monotonic()) >= self._next:
            since = "since the last line" if self._next else "at once"
            first = f"{self._count} {since}, such as: " if self._count > 1 else ""
            self._log(f"{first}{message[:_LONGEST]}")
            self._count, self._next = 0, now + _SAMPLED_S


_SAMPLED_S, _LONGEST = 10.0, 1000


class LogOnce:
    """Logs a problem once until it changes or is solved.

    Args:
        log: writes a line.
        problem: a problem that is logged already, or None.

    Attributes:
        problem: the current problem, or None.
    """

    def __init__(self, log: Callable[[str], None], problem: str | None = None) -> None:
        self._log, self.problem = log, problem

    def __call__(self, problem: str | None) -> None:
        """Set the current problem. None: it is solved."""
        if problem is not None and problem != self.problem:
            self._log(problem)
        self.problem = problem


def triton_record(line: str, source: str = "triton") -> logging.LogRecord:
    """A line of tritonserver's output as a record. If it is not in tritonserver's form, `source` printed it."""
    match = _TRITON.fullmatch(line)
    if match is None:
        return logging.makeLogRecord(_record(source, logging.INFO, _COLOUR.sub("", line), event="printed"))
    level, location, text = _LEVELS[match[1]], match[2], _unquoted(match[3])
    if text.startswith(NO_GPU):
        level = logging.INFO
    of_model = _OF_MODEL.fullmatch(text)
    if of_model is None:
        return logging.makeLogRecord(_record("triton", level, text, event=location))
    event, model, version, message = of_model.groups()
    return logging.makeLogRecord(_record("model", level, message, event=event, model=model, version=int(version)))


def _record(name: str, level: int, message: str, **about: Any) -> dict[str, Any]:
    return {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message, **about}


def _unquoted(text: str) -> str:
    """The text of a message, which Triton puts into quotes and escapes as JSON does."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        with suppress(ValueError):
            return str(json.loads(text))
    return text


_LINES_KEPT = 200
# An error in the log: the time, the process and a line of Triton's code, then the text.
_ERROR = re.compile(r"E\d{4} [^\]]*\] \"?(.*?)\"?$")
_FATAL = re.compile(r"error: (.*)")
# Triton adds the line of code to an error that a Python model raised.
_AT = re.compile(r"\\n\\nAt:.*")
# After an unknown option, tritonserver prints four hundred lines about its options. They begin with this.
_USAGE = b"Usage: tritonserver"
_PATIENCE_S = 2.0


class Output:
    """Logs the output of a server, line by line, on its own thread, until the server has ended.

    Args:
        source: the pipe that the server writes to.
        log: gets every line.
        name: the name of the program that writes the lines.
    """

    def __init__(self, source: BinaryIO, log: logging.Logger, name: str = "triton") -> None:
        self._source, self._name = source, name
        self._log = log
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def reason(self) -> str:
        """One line that says why the server ended: the last error in its log, or else its last line."""
        self.drain()
        lines = [line for line in list(self._lines) if line.strip() and NO_GPU not in line]
        reasons = _matches(_ERROR, lines) or _matches(_FATAL, lines) or lines or ["it said nothing"]
        return _AT.sub("", reasons[-1])

    def drain(self) -> None:
        """Wait at most 2 s until all lines are copied: a model's process may keep the pipe open for longer."""
        self._thread.join(_PATIENCE_S)

    def _copy(self) -> None:
        is_usage = False
        with self._source:
            for line in self._source:
                is_usage = is_usage or line.startswith(_USAGE)
                if not is_usage:
                    text = line.decode(errors="replace").rstrip()
                    self._lines.append(text)
                    self._log.handle(triton_record(text, self._name))


def _matches(pattern: re.Pattern[str], lines: list[str]) -> list[str]:
    return [match[1] for line in lines if (match := pattern.match(line))]
