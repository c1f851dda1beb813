"""Read JSON and text that anybody may have made. Unknown and missing keys of JSON are refused by name."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

# What decoding may raise: for text that is no JSON, of an unexpected type, not UTF-8, or nested too deep.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what JSON is decoded to: immutable, made by keyword. JSON must not have other keys."""


class _Object(dict[str, Any]):
    """A JSON object. `twice` is a key that it has more than once; None: it has none."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = None if len(self) == len(pairs) else Counter(key for key, _ in pairs).most_common(1)[0][0]


def json_tree(text: bytes) -> Any:
    """JSON as dicts, lists, text and floats. Unlike msgspec and json, it takes no object that has a key twice.

    Raises:
        ValueError: a key stands twice in an object, named as msgspec does, `$.a[0].b`; or `text` is not JSON.
        RecursionError: it is nested too deep.
    """
    # int() refuses 5,000 digits. Nobody reads numbers here.
    tree = json.loads(text.decode(), object_pairs_hook=_Object, parse_int=float)
    for place in _keys_twice(tree, "$"):
        raise ValueError(f"expected each key once, got `{place}` twice")
    return tree


def _keys_twice(node: Any, place: str) -> Iterator[str]:
    if isinstance(node, _Object):
        if node.twice is not None:
            yield f"{place}.{node.twice}"
        for key, each in node.items():
            yield from _keys_twice(each, f"{place}.{key}")
    elif isinstance(node, list):
        for number, each in enumerate(node):
            yield from _keys_twice(each, f"{place}[{number}]")


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
