"""Settings by table: a name or a glob over names, the last that matches counts."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from export.errors import ConfigError

T = TypeVar("T")


def last_match(settings: Mapping[str, T], table: str, default: T) -> T:
    """The setting of `table`."""
    matching = [setting for pattern, setting in settings.items() if fnmatchcase(table, pattern)]
    return matching[-1] if matching else default


def check_patterns(setting: str, patterns: Iterable[str], tables: Iterable[str]) -> None:
    """Refuse a pattern that matches no table: it is a typing error, not a wish.

    Raises:
        ConfigError: naming the pattern and the tables there are.
    """
    names = list(tables)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{setting} {pattern!r}: expected the name of a table or a glob over names, "
                f"matches none of {', '.join(names)}"
            )
