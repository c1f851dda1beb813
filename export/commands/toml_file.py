"""Read TOML files into types."""

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from serving.errors import ConfigurationError
from serving.files.reading import read_file
from serving.files.strict import UNREADABLE

T = TypeVar("T")


def read_toml(path: Path, kind: type[T]) -> T:
    """Read the file at `path` as a `kind`.

    Raises:
        ConfigurationError: the file cannot be read; or naming the line or key that is wrong.
    """
    try:
        return msgspec.convert(tomllib.loads(read_file(path, follow=True).decode()), kind)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, *UNREADABLE) as error:  # TOMLDecodeError; and int() refuses 5,000 digits
        raise ConfigurationError(f"{path}: {error}") from error
