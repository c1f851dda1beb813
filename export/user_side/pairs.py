"""Products of all pairs of rows, as `bmm(rows, rows.transpose(1, 2))` computes them for the features of DLRM.

Some rows are the user's, and others the items'. The matrix of products has four blocks: user by user is the same for
all items; user by item, and item by user, is one linear layer over the items' rows; item by item is for each item.
What reads only some of the pairs, such as those above the diagonal, needs only some of the blocks
(`export.user_side.indices`); a block that nothing reads is not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from export.user_side.builder import Builder
from export.user_side.indices import block_at, in_order
from export.user_side.shapes import permuted
from export.user_side.values import ITEMS, Joined, Part, Value, changed

_ATEN = torch.ops.aten
_TRANSPOSED = (0, 2, 1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a value.

    Attributes:
        parts: the rows of the user, [1, M, K], then those of the items, [items, N, K]. A value may lack either.
        order: of each row of the value, its number among the rows of `parts`.
    """

    parts: tuple[Part, ...]
    order: tuple[int, ...]


def products_of_rows(build: Builder, first: Value, second: Value) -> Value | None:
    """A product of matrices, `first @ second`, in blocks of the user and of the items.

    Args:
        build: the graph.
        first: [items, rows, K].
        second: [items, K, columns].

    Returns:
        [items, rows, columns], or None if no row and no column is the user's.
    """
    if any(len(value.shape) != len(_TRANSPOSED) or value.shape[0] != ITEMS for value in (first, second)):
        return None
    rows, columns = _rows(build, first), _rows(build, permuted(build, second, _TRANSPOSED))
    if not any(part.per_user and not build.is_constant(part) for part in (*rows.parts, *columns.parts)):
        return None
    of_user: dict[tuple[object, object], Part] = {}
    lines = [_joined([_products(build, row, column, of_user) for column in columns.parts], 2) for row in rows.parts]
    matrix = in_order(_joined(lines, 1), 1, rows.order)
    return in_order(matrix, 2, columns.order)


def _rows(build: Builder, value: Value) -> _Rows:
    sources = [block_at(build, value, 1, (row,)) for row in range(value.shape[1])]
    blocks = {(block.node, block.shape): block for block, _ in sources}
    parts: list[Part] = []
    starts: dict[object, int] = {}
    count = 0
    for per_user in (True, False):
        chosen = {key: block for key, block in blocks.items() if block.per_user is per_user}
        if not chosen:
            continue
        width = sum(block.shape[1] for block in chosen.values())
        joined = build.joined([*chosen.values()], 1, changed(value.shape, 1, width))
        parts.append(build.expanded(joined, (1 if per_user else ITEMS, width, value.shape[2])))
        for key, block in chosen.items():
            starts[key] = count
            count += block.shape[1]
    return _Rows(tuple(parts), tuple(starts[block.node, block.shape] + row for block, (row,) in sources))


def _products(build: Builder, rows: Part, columns: Part, of_user: dict[tuple[object, object], Part]) -> Part:
    """A block, [items, rows, columns]. `of_user` has the products of the items' rows with the user's."""
    shape = (ITEMS, rows.shape[1], columns.shape[1])
    if rows.per_user and not columns.per_user:
        block = permuted(build, _products(build, columns, rows, of_user), _TRANSPOSED)
        assert isinstance(block, Part)  # noqa: S101
        return block
    if columns.per_user and not rows.per_user:
        key = rows.node, columns.node
        if key not in of_user:
            of_user[key] = build.linear(rows, build.reshaped(columns, columns.size[1:]))
        return of_user[key]
    transposed = build.call(_ATEN.permute, columns.node, [*_TRANSPOSED])
    node = build.call(_ATEN.matmul, rows.node, transposed)
    return Part(node, (1 if rows.per_user else ITEMS, *shape[1:]), shape, rows.per_user)


def _joined(parts: Sequence[Value], dim: int) -> Value:
    if len(parts) == 1:
        return parts[0]
    width = sum(part.shape[dim] for part in parts)
    return Joined(tuple(parts), dim, changed(parts[0].shape, dim, width))
