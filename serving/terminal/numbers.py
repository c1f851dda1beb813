"""Numbers as people write them, in ASCII. Python's int() and float() also take " 3", "1_000" and other digits."""

import re

from serving.errors import ConfigurationError

_INTEGER = re.compile(r"-?[0-9]+")
_REAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?:inf|nan)", re.IGNORECASE)


def integer(setting: str, text: str) -> int:
    """A whole number.

    Raises:
        ConfigurationError: the text is no whole number; names the setting.
    """
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
    except ValueError:  # it refuses 5,000 digits
        pass
    raise ConfigurationError(f"{setting}: expected a whole number, got {text!r}")


def real(setting: str, text: str) -> float:
    """A number; it may be infinite or NaN.

    Raises:
        ConfigurationError: the text is no number; names the setting.
    """
    if not _REAL.fullmatch(text):
        raise ConfigurationError(f"{setting}: expected a number, got {text!r}")
    return float(text)
