"""TOML files, as types."""

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from export.errors import ConfigError
from serving.strict import UNREADABLE

T = TypeVar("T")


def read_toml(path: Path, kind: type[T]) -> T:
    """What a file says.

    Raises:
        ConfigError: it cannot be read, or naming the line or key that is wrong.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, *UNREADABLE) as error:  # tomllib's own, and what int() has against 5,000 digits
        raise ConfigError(f"{path}: {error}") from error
