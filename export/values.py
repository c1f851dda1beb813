"""Values as people write them: 16GB, 10Gb/s, int8, default_row:0. Errors name the setting that a value is for."""

import re
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from typing import TypeVar

from rich.filesize import decimal

from serving.bundle.formats import WeightDtype
from serving.bundle.plan import IdDtype
from serving.bundle.scores import DenseCompiler, DenseDtype
from serving.bundle.tables import DefaultRow, IdPolicy, OutputDtype
from serving.errors import ConfigurationError
from serving.terminal.options import integer

E = TypeVar("E", bound=Enum)

# More than any machine has.
MOST_BYTES = 1 << 60
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def size_bytes(setting: str, text: str | int, least: int = 1) -> int:
    """Read "16 GB" (16·10⁹), "16GiB" (16·2³⁰) or a plain number of bytes.

    Args:
        setting: its name, for errors.
        text: the size.
        least: the smallest allowed size, in bytes.

    Raises:
        ConfigurationError: the text is not a size, or is below `least` or above MOST_BYTES.
    """
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)", str(text).strip())
    # Exact: as a float, 2^60 + 1 is 2^60.
    size = Fraction(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0
    if not least <= size <= MOST_BYTES:
        raise ConfigurationError(
            f"{setting}: expected a size such as 16GB or 16GiB, at most {MOST_BYTES} bytes, got {str(text)!r}"
        )
    return int(size)


def bytes_per_s(setting: str, text: str | int) -> int:
    """Read a bandwidth: "10 Gb/s" (10⁹ bits), "1.25GB/s" (10⁹ bytes), or a plain number of bytes a second.

    Args:
        setting: its name, for errors.
        text: the bandwidth; b is a bit, B a byte.

    Raises:
        ConfigurationError: the text is no such number, or below 1 byte or above MOST_BYTES a second.
    """
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?(?:([kKmMgGtT]?i?)([bB])/s)?", str(text).strip())
    bits = Fraction(match[1]) * _UNITS.get(f"{match[2] or ''}b".lower(), 0) * 8 if match else Fraction(0)
    size = bits / 64 if match and match[3] == "b" else bits / 8
    if not 1 <= size <= MOST_BYTES:
        raise ConfigurationError(f"{setting}: expected a bandwidth such as 10Gb/s or 1.25GB/s, got {str(text)!r}")
    return int(size)


def size_text(size_bytes: int) -> str:
    """Write a number of bytes in powers of 1000: "1.5 MB"."""
    return decimal(size_bytes).replace("bytes", "B").replace("byte", "B")


def error_text(error: float) -> str:
    """Write an error with two digits, or "0"."""
    return f"{error:.1e}" if error else "0"


def _named(kind: type[E]) -> Callable[[str, str], E]:
    """A function that reads a member of `kind` by name, such as int8; other names raise ConfigurationError."""

    def member(setting: str, text: str) -> E:
        try:
            return kind(text.upper())
        except ValueError as error:
            names = ", ".join(str(member.value).lower() for member in kind)
            raise ConfigurationError(f"{setting}: expected one of {names}, got {text.lower()!r}") from error

    return member


weight_dtype = _named(WeightDtype)
dense_compiler = _named(DenseCompiler)
dense_dtype = _named(DenseDtype)
output_dtype = _named(OutputDtype)
id_dtype = _named(IdDtype)


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
