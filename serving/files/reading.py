"""Read files that are not trusted: safely, and strictly."""

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

# Most bytes of a manifest, a settings file, a signature or a file of keys.
SMALL = 64 << 20


def open_file(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: whether `path` may be a symbolic link. A file that the operator names may be one. Folders on the way
            to it always may.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(error.errno, "expected a file, got a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
    return open(descriptor, "rb")


def read_file(path: Path, most_bytes: int = SMALL, *, follow: bool = False) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: as `open_file`, or the file is larger than `most_bytes`.
    """
    with open_file(path, follow=follow) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, got more", str(path))
    return content


# What decoding raises if a text is no JSON, has an unexpected type, is not UTF-8, or is nested too deep.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the types that JSON is decoded to: immutable, made by keyword. JSON with unknown keys is refused."""


class _Object(dict[str, Any]):
    """A JSON object. `twice` is a key that it has more than once, or None."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = None if len(self) == len(pairs) else Counter(key for key, _ in pairs).most_common(1)[0][0]


def json_tree(text: bytes) -> Any:
    """JSON as dicts, lists, text and floats. Unlike msgspec and json, it refuses an object that has a key twice.

    Raises:
        ValueError: an object has a key twice, or `text` is not JSON. The message names the key as msgspec does:
            `$.a[0].b`.
        RecursionError: it is nested too deep.
    """
    # int() would refuse 5,000 digits. The numbers of this tree are not used.
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
    """`path` with U+FFFD in place of bytes that are not UTF-8, so that it can be part of JSON and HTML."""
    return os.fsencode(path).decode(errors="replace")
