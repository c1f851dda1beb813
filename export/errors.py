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

from collections.abc import Iterator


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


def last_line(error: Exception) -> str:
    """The last line of what an error of other code says, or its class: there it comes behind a trace."""
    return next(iter([*_lines(error)][::-1]), type(error).__name__)


def _lines(error: Exception) -> Iterator[str]:
    return (line for line in str(error).splitlines() if line.strip())
