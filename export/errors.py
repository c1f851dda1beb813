"""The errors of an export, under one root::

    ExportError
    ├── ModelError        the module's tables cannot be served
    ├── CheckpointError   the weights cannot be read
    ├── QuantizeError     a row cannot be stored
    ├── PlanError         the tables do not fit the ranks
    ├── ParityError       the answers differ too much
    └── PublishError      the repository cannot take the bundle

A setting that cannot be used is a `serving.errors.ConfigurationError` instead.
"""

import re
from collections.abc import Callable, Iterator

# TorchScript marks a part of a line in the next one. The innermost step comes first, its callers after it.
_MARKED = re.compile(r"^(.*)\n *~+ <--- HERE", re.MULTILINE)
# torch.fx frees what is not needed any more in the same line.
_FORGOTTEN = re.compile(r";( +\w+ =)+ None.*$")


class ExportError(Exception):
    """Root of the errors of an export. Nothing was published."""


class ModelError(ExportError):
    """The module's tables cannot be served, or a module around them changes ids or weights."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or does not hold the tables of the module."""


class QuantizeError(ExportError):
    """A row cannot be stored in its dtype. The message names table and row."""


class PlanError(ExportError):
    """The tables do not fit the ranks. The message names a table, and by how much it does not fit."""


class ParityError(ExportError):
    """Answers moved further than their limit. The message names the tables and the step."""


class PublishError(ExportError):
    """The repository cannot take the bundle."""


def first_line(error: Exception) -> str:
    """The first line of what an error of other code says, or its class: compilers begin with what is wrong."""
    return next(_lines(error), type(error).__name__)


def compiler_line(error: Exception, line_of: Callable[[str], str]) -> str:
    """What TorchScript says of an error: its first line, and the step of the program that it marks.

    Args:
        error: TorchScript's.
        line_of: says where in the user's own code the step is that has this text, " at …"; or "".
    """
    marked = _MARKED.search(str(error))
    if marked is None:
        return first_line(error)
    step = _FORGOTTEN.sub("", marked[1].strip())
    return f"{first_line(error).rstrip('.:')}: `{step}`{line_of(step)}"


def last_line(error: Exception) -> str:
    """The last line of the message of another library's error, where traces come first; or its class."""
    return next(iter([*_lines(error)][::-1]), type(error).__name__)


def _lines(error: Exception) -> Iterator[str]:
    return (line for line in str(error).splitlines() if line.strip())
