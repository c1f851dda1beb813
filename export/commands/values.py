"""Values as people write them: int8, default_row:0, 20. Every error names the setting that the value is for."""

from enum import Enum
from typing import TypeVar

from serving.bundle.plan import IdDtype
from serving.bundle.scores import DenseDtype
from serving.bundle.tables import DefaultRow, IdPolicy, OutputDtype, WeightDtype
from serving.errors import ConfigurationError
from serving.terminal.options import integer

E = TypeVar("E", bound=Enum)


def weight_dtype(setting: str, text: str) -> WeightDtype:
    """The dtype of a table by its name, such as int8.

    Raises:
        ConfigurationError: there is no dtype of that name.
    """
    return _member(setting, WeightDtype, text)


def dense_dtype(setting: str, text: str) -> DenseDtype:
    """The dtype of a dense part by its name, such as bf16.

    Raises:
        ConfigurationError: there is no dtype of that name.
    """
    return _member(setting, DenseDtype, text)


def output_dtype(setting: str, text: str) -> OutputDtype:
    """The dtype of answers by its name, such as fp16.

    Raises:
        ConfigurationError: there is no dtype of that name.
    """
    return _member(setting, OutputDtype, text)


def id_dtype(setting: str, text: str) -> IdDtype:
    """The dtype of ids by its name, such as int32.

    Raises:
        ConfigurationError: there is no dtype of that name.
    """
    return _member(setting, IdDtype, text)


def id_policy(setting: str, text: str) -> IdPolicy | DefaultRow:
    """The policy `error`, `zero`, `modulo`, or `default_row:ROW`.

    Raises:
        ConfigurationError: there is no such policy, or ROW is no number.
    """
    name, _, row = text.lower().partition(":")
    if name == "default_row":
        return DefaultRow(default_row=integer(setting, row))
    try:
        return IdPolicy(text.lower())
    except ValueError as error:
        names = ", ".join(policy.value for policy in IdPolicy)
        raise ConfigurationError(f"{setting}: expected {names} or default_row:ROW, got {text!r}") from error


def _member(setting: str, kind: type[E], text: str) -> E:
    try:
        return kind(text.upper())
    except ValueError as error:
        names = ", ".join(str(member.value).lower() for member in kind)
        raise ConfigurationError(f"{setting}: expected one of {names}, got {text.lower()!r}") from error
