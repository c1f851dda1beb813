"""Texts of errors, fit for a screen: they may be made of what another machine said."""

from collections.abc import Iterable

# The most characters of an error that travels.
MOST = 1000
_MOST_OF_A_NAME = 100
_MOST_NAMES = 3


def shown(text: str, most: int = MOST) -> str:
    """At most so many characters of a text. Control characters, line ends among them, are escaped."""
    # What is cut off need not be escaped: a text may be megabytes.
    kept = "".join(each if each.isprintable() else _escaped(each) for each in text[: most + 1])
    return kept if len(kept) <= most else f"{kept[: most - 1]}…"


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    all_names = [*names]
    first = ", ".join(shown(each, _MOST_OF_A_NAME) for each in all_names[:_MOST_NAMES])
    more = len(all_names) - _MOST_NAMES
    return first if more <= 0 else f"{first} and {more} more"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
