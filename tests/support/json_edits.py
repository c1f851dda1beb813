"""JSON documents one edit away from another."""

import json
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    0.5,
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a\0b",
    "\ud7ff",
    [],
    {},
    [[]],
    {"x": 1},
]


def nodes(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON document, but to the items of a list after its second."""
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
    for key, value in items:
        yield from nodes(value, (*path, key))


def edits(manifest: Any) -> Iterator[Any]:
    """The manifest with one thing changed: every value by every other, gone, twice, in another order."""
    text = json.dumps(manifest)

    def at(path: tuple[Any, ...]) -> tuple[Any, Any]:
        copy = json.loads(text)
        parent = copy
        for key in path[:-1]:
            parent = parent[key]
        return copy, parent

    for path in nodes(manifest):
        key = path[-1]
        for value in VALUES:
            copy, parent = at(path)
            if parent[key] != value or type(parent[key]) is not type(value):
                parent[key] = value
                yield copy
        copy, parent = at(path)
        value = parent.pop(key)
        yield copy
        if isinstance(parent, dict):
            copy, parent = at(path)
            parent[key + "s"] = value
            yield copy
        else:
            copy, parent = at(path)
            parent.append(value)
            yield copy
            copy, parent = at(path)
            parent.reverse()
            yield copy
        if type(value) is int:
            for other in (value + 1, value - 1, 2 * value, -value):
                copy, parent = at(path)
                parent[key] = other
                yield copy
