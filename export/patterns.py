"""Settings by table: a pattern is a table's name or a glob over names. The last pattern that matches counts."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from serving.errors import ConfigurationError

T = TypeVar("T")


def last_match(settings: Mapping[str, T], table: str, default: T) -> T:
    """The setting of `table`, or `default` where no pattern matches."""
    matching = [setting for pattern, setting in settings.items() if fnmatchcase(table, pattern)]
    return matching[-1] if matching else default


def check_patterns(setting: str, patterns: Iterable[str], tables: Iterable[str]) -> None:
    """Refuse a pattern that matches no table: it is a typing error.

    Args:
        setting: the name of the setting, for the message.
        patterns: its patterns.
        tables: the names of all tables.

    Raises:
        ConfigurationError: naming the pattern and the tables there are.
    """
    names = list(tables)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"{setting} {pattern!r}: expected the name of a table or a glob over names, "
                f"matches none of {', '.join(names)}"
            )
