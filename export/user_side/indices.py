"""Rules for operators that take numbers at indices that are known at export, such as the pairs above a diagonal.

A matrix may be made of blocks, of which some are the same for all items. Each block gives its own numbers.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from export.user_side.builder import Builder
from export.user_side.call import Call
from export.user_side.values import ITEMS, Joined, Part, Reordered, Value, changed

_ATEN = torch.ops.aten
_INDICES = (torch.int64, torch.int32)
Position = tuple[int, ...]


def index(call: Call) -> Value | None:
    """Numbers at the same positions of each item, as `matrix[:, rows, columns]` has them."""
    indices: Any = call.node.args[1]
    first = next((dim for dim, node in enumerate(indices) if node is not None), 0)
    entries = [None if node is None else call.entries[node] for node in indices[first:]]
    return _taken(call, first, entries)


def index_select(call: Call) -> Value | None:
    """Some indices of a dimension."""
    value = call.value(0)
    return None if value is None else _taken(call, call.dim(1, len(value.shape)), [call.argument(2)])


def _taken(call: Call, first: int, entries: Sequence[object]) -> Value | None:
    """Numbers at indices of adjacent dimensions, the first of which is `first`."""
    value = call.value(0)
    if value is None or not first or value.shape[0] != ITEMS:
        return None
    columns: list[list[int]] = []
    for dim, entry in enumerate(entries, start=first):
        tensor = call.build.known_tensor(entry) if isinstance(entry, Part) else None
        if tensor is None or tensor.dim() != 1 or tensor.dtype not in _INDICES:
            return None
        columns.append((tensor % value.shape[dim]).tolist())
    if not columns[0] or len({len(column) for column in columns}) > 1:
        return None
    return numbers_at(call.build, value, first, [*zip(*columns, strict=True)])


def numbers_at(build: Builder, value: Value, first: int, positions: Sequence[Position]) -> Value:
    """The numbers at some positions of adjacent dimensions, which become one dimension.

    Args:
        build: the graph.
        value: [items, …].
        first: the first of these dimensions.
        positions: an index of each of these dimensions.
    """
    count = len(positions[0])
    shape = (*value.shape[:first], len(positions), *value.shape[first + count :])
    if isinstance(value, Joined) and not first <= value.dim < first + count:
        parts = tuple(numbers_at(build, part, first, positions) for part in value.parts)
        return Joined(parts, value.dim if value.dim < first else value.dim - count + 1, shape)
    sources = [block_at(build, value, first, position) for position in positions]
    blocks: dict[Any, tuple[Part, set[Position]]] = {}  # with the positions that are needed of each
    for block, position in sources:
        blocks.setdefault((block.node, block.shape), (block, set()))[1].add(position)
    numbers: list[Part] = []
    offsets: dict[Any, int] = {}
    for key, (block, needed) in blocks.items():
        ordered = sorted(needed)
        numbers.append(_numbers_of(build, block, first, ordered))
        offsets |= {(key, position): offset for offset, position in enumerate(ordered, start=len(offsets))}
    joined = Joined(tuple(numbers), first, changed(shape, first, len(offsets)))
    order = tuple(offsets[(block.node, block.shape), position] for block, position in sources)
    return in_order(numbers[0] if len(numbers) == 1 else joined, first, order)


def in_order(value: Value, dim: int, order: tuple[int, ...]) -> Value:
    """Indices of a value along a dimension, in some order."""
    if order == (*range(value.shape[dim]),):
        return value
    return Reordered(value, dim, order, changed(value.shape, dim, len(order)))


def block_at(build: Builder, value: Value, first: int, position: Position) -> tuple[Part, Position]:
    """The tensor with a number, and the number's position in it."""
    while isinstance(value, Joined | Reordered) and first <= value.dim < first + len(position):
        dim = value.dim
        coordinate = position[dim - first]
        if isinstance(value, Reordered):
            coordinate, value = value.order[coordinate], value.source
        else:
            ends = [*accumulate(part.shape[dim] for part in value.parts)]
            number = bisect_right(ends, coordinate)
            coordinate -= ends[number - 1] if number else 0
            value = value.parts[number]
        position = (*position[: dim - first], coordinate, *position[dim - first + 1 :])
    block = build.part_of(value)
    transposed = _transposed(block, first) if len(position) == 2 else None
    return (block, position) if transposed is None else (transposed, position[::-1])


def _transposed(block: Part, first: int) -> Part | None:
    """The tensor of which a tensor is the transposed, with two adjacent dimensions the other way round, or None."""
    order = [*range(len(block.size))]
    order[first : first + 2] = first + 1, first
    if block.node.target is not _ATEN.permute or block.node.args[1] != order:
        return None
    node: Any = block.node.args[0]
    size, shape = (tuple(widths[dim] for dim in order) for widths in (block.size, block.shape))
    return Part(node, size, shape, block.per_user)


def _numbers_of(build: Builder, block: Part, first: int, positions: Sequence[Position]) -> Part:
    """The numbers at some positions of a tensor."""
    last = first + len(positions[0])
    widths = block.shape[first:last]
    block = build.expanded(block, (*block.size[:first], *widths, *block.size[last:]))
    size, shape = ((*of[:first], math.prod(widths), *of[last:]) for of in (block.size, block.shape))
    flat = build.reshaped(block, size, shape)
    numbers = np.ravel_multi_index([*zip(*positions, strict=True)], widths).tolist()
    return build.indexed(flat, first, numbers)
