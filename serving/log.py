"""What a server logs: an event a line, with its time, its level and what it is about, as text or JSON.

`tbe-serve run` says what it does. What tritonserver and its models say is put into the same form. Run with Triton
24.10. The source of 26.04 was read: its log has the same format.
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

# What a record may have beside its message. `event` names what happened in one word, or the line of Triton's code.
_ABOUT = ("event", "host", "model", "version", "lineage", "sequence", "sha256")
_CONTROL = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]+\s*")


class LogFormat(StrEnum):
    """How an event is written."""

    TEXT = "text"
    JSON = "json"


def server_log(path: Path | None = None, form: LogFormat = LogFormat.TEXT, host: int | None = None) -> logging.Logger:
    """A log of a server, without colours.

    Args:
        path: the file, which is emptied, and which only its own user can read. None: stderr.
        form: text, `TIME LEVEL SOURCE EVENT: MESSAGE`, or a JSON object with these, and `model`, `version` and `host`
            where the event is about one. Time is UTC, as in RFC 3339.
        host: the number of the host of a router whose server it is.

    Raises:
        ConfigurationError: the file cannot be made or written to.
    """
    log = logging.Logger("tbe-serve")
    handler = _Handler(_sink(path))
    handler.setFormatter(_Form(form, host))
    log.addHandler(handler)
    return log


def close_log(log: logging.Logger) -> None:
    """Close the file of a log. What is logged later is lost."""
    for handler in log.handlers:
        handler.close()


def _sink(path: Path | None) -> BinaryIO:
    if path is None:
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError):  # another object is in its place, as in a notebook
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
        with suppress(OSError, ValueError):  # a full disk, or a reader that is gone: the server goes on
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
# What libraries print in colours; and the error of a machine that has no GPU, which is none.
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
NO_GPU = "CudaDriverHelper"
_OF_MODEL = re.compile(r"\[(\w+) (.+?)/(\d+)\] (.*)", re.DOTALL)


def about_model(log: Callable[[str], None], event: str, model: str, version: str) -> Callable[[str], None]:
    """What a model's process logs by Triton's logger, so that `triton_record` reads what it is about.

    Args:
        log: of Triton's `pb_utils.Logger`.
        event: what happened.
        model: the name of the model.
        version: of the model.
    """
    return lambda message: log(f"[{event} {model}/{version}] {message}")


class Sampled:
    """Logs the first of what may happen often; then, at most every 10 s, one more, and how many there were.

    Args:
        log: takes the lines.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._count, self._next = 0, 0.0

    def __call__(self, message: str, count: int = 1) -> None:
        """Count an event, or several, and log it if none was lately. Of a long message, the beginning."""
        self._count += count
        if (now := time.monotonic()) >= self._next:
            since = "since the last line" if self._next else "at once"
            first = f"{self._count} {since}, such as: " if self._count > 1 else ""
            self._log(f"{first}{message[:_LONGEST]}")
            self._count, self._next = 0, now + _SAMPLED_S


_SAMPLED_S, _LONGEST = 10.0, 1000


def triton_record(line: str, source: str = "triton") -> logging.LogRecord:
    """A line of tritonserver's log as a record. One that is none of its own form was printed by `source`."""
    match = _TRITON.fullmatch(line)
    if match is None:
        return logging.makeLogRecord(_record(source, logging.INFO, _COLOUR.sub("", line), event="printed"))
    level, location, said = _LEVELS[match[1]], match[2], _unquoted(match[3])
    if said.startswith(NO_GPU):
        level = logging.INFO
    of_model = _OF_MODEL.fullmatch(said)
    if of_model is None:
        return logging.makeLogRecord(_record("triton", level, said, event=location))
    event, model, version, message = of_model.groups()
    return logging.makeLogRecord(_record("model", level, message, event=event, model=model, version=int(version)))


def _record(name: str, level: int, message: str, **about: Any) -> dict[str, Any]:
    return {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message, **about}


def _unquoted(text: str) -> str:
    """Triton puts text into quotes, and escapes it as JSON does."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        with suppress(ValueError):
            return str(json.loads(text))
    return text


_LINES_KEPT = 200
# An error in the log. Before its text come the time, the process and a line of Triton's code.
_ERROR = re.compile(r"E\d{4} [^\]]*\] \"?(.*?)\"?$")
_FATAL = re.compile(r"error: (.*)")
# Triton adds the line of code to an error that a Python model raised.
_AT = re.compile(r"\\n\\nAt:.*")
# After an unknown option, tritonserver prints four hundred lines about its options. They begin with this.
_USAGE = b"Usage: tritonserver"
_PATIENCE_S = 2.0


class Output:
    """Logs what a server says, line by line, on a thread of its own, until the server has ended.

    Args:
        source: the pipe that the server writes to.
        log: takes every line.
        name: of the program that writes them.
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
        said = _matches(_ERROR, lines) or _matches(_FATAL, lines) or lines or ["it said nothing"]
        return _AT.sub("", said[-1])

    def drain(self) -> None:
        """Wait until all lines are copied, for 2 s at most: a model's process may keep the pipe open."""
        self._thread.join(_PATIENCE_S)

    def _copy(self) -> None:
        is_usage = False
        with self._source:
            for line in self._source:
                is_usage = is_usage or line.startswith(_USAGE)
                if not is_usage:
                    said = line.decode(errors="replace").rstrip()
                    self._lines.append(said)
                    self._log.handle(triton_record(said, self._name))


def _matches(pattern: re.Pattern[str], lines: list[str]) -> list[str]:
    return [match[1] for line in lines if (match := pattern.match(line))]
