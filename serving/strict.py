"""What anybody may have made: JSON, whose unknown and missing keys are refused by name, and text."""

import os
from pathlib import Path

import msgspec

# What decoding may raise: no JSON, another type than expected, no UTF-8, brackets without end.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, by keyword, and nothing but its fields."""


def is_utf8(text: str) -> bool:
    """Whether protobuf and JSON can carry `text`: a command line can hold bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_text(path: Path | str) -> str:
    """`path` as JSON and HTML can carry it: with U+FFFD for bytes that are not UTF-8."""
    return os.fsencode(path).decode(errors="replace")
