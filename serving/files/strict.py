"""Read JSON and text that anybody may have made. Unknown and missing keys of JSON are refused by name."""

import os
from pathlib import Path

import msgspec

# What decoding may raise: for text that is no JSON, of an unexpected type, not UTF-8, or nested too deep.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what JSON is decoded to: immutable, made by keyword. JSON must not have other keys."""


def is_utf8(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8, as protobuf and JSON need. A command line can hold other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_text(path: Path | str) -> str:
    """`path` with U+FFFD in place of bytes that are not UTF-8, so that JSON and HTML can carry it."""
    return os.fsencode(path).decode(errors="replace")
