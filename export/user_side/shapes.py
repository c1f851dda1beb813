"""Rules for operators that move numbers, and compute none."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import fx

from export.user_side.builder import Builder
from export.user_side.call import Call
from export.user_side.indices import numbers_at
from export.user_side.values import (
    ITEMS,
    Joined,
    Part,
    Product,
    Reordered,
    Shape,
    Sum,
    Value,
    Widened,
    changed,
    is_value,
)

_ATEN = torch.ops.aten


def raised_value(build: Builder, value: Value, shape: Shape) -> Value:
    """A value of another shape, to which its own broadcasts."""
    if isinstance(value, Part):
        return build.raised(value, shape)
    if isinstance(value, Reordered):
        return build.raised(build.part_of(value), shape)
    return value if value.shape == shape else build.raised(build.part_of(value), shape)


def cut_value(build: Builder, value: Value, dim: int, start: int, width: int) -> Value:
    """Adjacent indices of one dimension of a value."""
    shape = changed(value.shape, dim, width)
    if shape == value.shape:
        return value
    if isinstance(value, Part):
        return build.cut(value, dim, start, width)
    if isinstance(value, Joined) and value.dim != dim:
        return Joined(tuple(cut_value(build, part, dim, start, width) for part in value.parts), value.dim, shape)
    if isinstance(value, Joined):
        parts: list[Value] = []
        for part in value.parts:
            part_width = part.shape[dim]
            first, last = max(start, 0), min(start + width, part_width)
            if first < last:
                parts.append(cut_value(build, part, dim, first, last - first))
            start -= part_width
        return parts[0] if len(parts) == 1 else Joined(tuple(parts), dim, shape)
    if isinstance(value, Reordered):
        if value.dim == dim:
            return Reordered(value.source, dim, value.order[start : start + width], shape)
        return Reordered(cut_value(build, value.source, dim, start, width), value.dim, value.order, shape)
    if isinstance(value, Widened):
        if dim == len(value.shape) - 1:
            return Widened(value.source, build.cut(value.weight, 0, start, width), shape)
        return build.cut(build.part_of(value), dim, start, width)
    if isinstance(value, Sum):
        cut_terms = []
        for sign, term in value.terms:
            raised = build.raised(term, value.shape) if isinstance(term, Part) else term
            cut = cut_value(build, raised, dim, start, width)
            assert not isinstance(cut, Joined | Sum | Reordered)  # noqa: S101
            cut_terms.append((sign, cut))
        return Sum(tuple(cut_terms), shape)
    other = cut_value(build, raised_value(build, value.other, value.shape), dim, start, width)
    factor = build.cut(build.raised(value.factor, value.shape), dim, start, width)
    assert not isinstance(other, Joined | Product | Reordered)  # noqa: S101
    return Product(factor, other, shape)


def take_slice(call: Call) -> Value | None:
    """Every index of a range, along any dimension but the items'."""
    value = call.value(0)
    if value is None or call.argument(4, 1) != 1:
        return None
    dim = call.dim(1, len(value.shape))
    start, end = call.argument(2), call.argument(3)
    start, end = 0 if start is None else start, value.shape[dim] if end is None else end
    if (
        not isinstance(start, int)
        or not isinstance(end, int)
        or isinstance(call.node.args[min(2, len(call.node.args) - 1)], fx.Node)
    ):
        return None
    if value.shape[dim] == ITEMS:
        return value if start == 0 and end >= ITEMS else None
    total = value.shape[dim]
    start, end = (min(max(number + total if number < 0 else number, 0), total) for number in (start, end))
    return cut_value(call.build, value, dim, start, end - start) if end > start else None


def narrow(call: Call) -> Value | None:
    """As `take_slice`."""
    value = call.value(0)
    if value is None or any(isinstance(argument, fx.Node) for argument in call.node.args[1:]):
        return None
    dim = call.dim(1, len(value.shape))
    start, length = call.argument(2), call.argument(3)
    if value.shape[dim] == ITEMS or start < 0 or length < 1:
        return None
    return cut_value(call.build, value, dim, start, length)


def split(call: Call) -> list[Value] | None:
    """Parts of given sizes."""
    value = call.value(0)
    sizes = call.argument(1)
    if value is None or any(isinstance(argument, fx.Node) for argument in call.node.all_input_nodes[1:]):
        return None
    dim = call.dim(2, len(value.shape))
    total = value.shape[dim]
    if total == ITEMS:
        return None
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    return None if 0 in sizes else _parts(call, value, dim, sizes)


def chunk(call: Call) -> list[Value] | None:
    """Parts of about one size."""
    value = call.value(0)
    if value is None:
        return None
    dim = call.dim(2, len(value.shape))
    widths = [tensor.shape[dim] for tensor in call.node.meta["val"]]
    if value.shape[dim] == ITEMS or not all(isinstance(width, int) and width for width in widths):
        return None
    return _parts(call, value, dim, widths)


def _parts(call: Call, value: Value, dim: int, widths: Sequence[int]) -> list[Value]:
    """The parts of a value along a dimension, one after the other."""
    starts = [sum(widths[:number]) for number in range(len(widths))]
    return [cut_value(call.build, value, dim, start, width) for start, width in zip(starts, widths, strict=True)]


def unbind(call: Call) -> list[Value] | None:
    """Each index of a dimension, without that dimension."""
    value = call.value(0)
    if value is None:
        return None
    dim = call.dim(1, len(value.shape))
    if value.shape[dim] == ITEMS:
        return None
    return [_selected(call.build, value, dim, number) for number in range(value.shape[dim])]


def getitem(call: Call) -> Value | None:
    """One of several values."""
    entry, number = call.argument(0), call.argument(1)
    return entry[number] if isinstance(entry, list) else None


def select(call: Call) -> Value | None:
    """One index of a dimension, without that dimension."""
    value = call.value(0)
    if value is None or not isinstance(call.node.args[2], int):
        return None
    dim = call.dim(1, len(value.shape))
    if value.shape[dim] == ITEMS:
        return None
    return _selected(call.build, value, dim, call.node.args[2] % value.shape[dim])


def _selected(build: Builder, value: Value, dim: int, number: int) -> Value:
    return _squeezed(build, cut_value(build, value, dim, number, 1), (dim,))


def squeeze(call: Call) -> Value | None:
    """Without dimensions that are 1. That of the items stays."""
    value = call.value(0)
    if value is None:
        return None
    dims = call.argument(1)
    rank = len(value.shape)
    chosen = range(rank) if dims is None else [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]
    return _squeezed(call.build, value, [dim for dim in chosen if value.shape[dim] == 1])


def _squeezed(build: Builder, value: Value, dims: Sequence[int]) -> Value:
    """A value without dimensions that are 1."""
    shape = tuple(width for dim, width in enumerate(value.shape) if dim not in dims)
    if isinstance(value, Joined) and value.dim not in dims:
        dim = value.dim - sum(other < value.dim for other in dims)
        return Joined(tuple(_squeezed(build, part, dims) for part in value.parts), dim, shape)
    part = build.part_of(value)
    size = tuple(width for dim, width in enumerate(part.size) if dim not in dims)
    return build.reshaped(part, size, shape)


def unsqueeze(call: Call) -> Value | None:
    """With one more dimension."""
    value = call.value(0)
    if value is None:
        return None
    return _unsqueezed(call.build, value, call.dim(1, len(value.shape) + 1))


def _unsqueezed(build: Builder, value: Value, dim: int) -> Value:
    shape = (*value.shape[:dim], 1, *value.shape[dim:])
    if isinstance(value, Joined):
        joined = value.dim + (dim <= value.dim)
        return Joined(tuple(_unsqueezed(build, part, dim) for part in value.parts), joined, shape)
    part = build.part_of(value)
    return build.reshaped(part, (*part.size[:dim], 1, *part.size[dim:]), shape)


def permute(call: Call) -> Value | None:
    """With its dimensions in another order."""
    value = call.value(0)
    if value is None:
        return None
    order = list(range(len(value.shape)))
    name = str(call.node.target)
    if name == "aten.permute.default":
        order = [dim % len(order) for dim in call.argument(1)]
    elif name == "aten.transpose.int":
        first, second = call.dim(1, len(order)), call.dim(2, len(order))
        order[first], order[second] = order[second], order[first]
    elif len(order) == 2:
        order = [1, 0]
    return permuted(call.build, value, order)


def permuted(build: Builder, value: Value, order: Sequence[int]) -> Value:
    """A value with its dimensions in another order."""
    shape = tuple(value.shape[dim] for dim in order)
    if isinstance(value, Joined):
        return Joined(tuple(permuted(build, part, order) for part in value.parts), order.index(value.dim), shape)
    if isinstance(value, Reordered):
        return Reordered(permuted(build, value.source, order), order.index(value.dim), value.order, shape)
    part = build.part_of(value)
    node: Any = part.node
    if node.target is _ATEN.permute and [node.args[1][dim] for dim in order] == [*range(len(order))]:
        node = node.args[0]  # the same numbers in their first order
    else:
        node = build.call(_ATEN.permute, node, [*order])
    return Part(node, tuple(part.size[dim] for dim in order), shape, part.per_user)


def expand(call: Call) -> Value | None:
    """A tensor broadcasts: it is repeated where an operator needs it."""
    value = call.value(0)
    if value is None:
        return None
    if str(call.node.target) == "aten.repeat.default":
        counts = call.argument(1)
        own_shape = (1,) * (len(call.shape) - len(value.shape)) + value.shape
        if any(count != 1 and width != 1 for count, width in zip(counts, own_shape, strict=True)):
            return None
    return raised_value(call.build, call.build.part_of(value), call.shape)


def view(call: Call) -> Value | None:
    """The same numbers of each item in another shape."""
    value = call.value(0)
    if value is None or value.shape[0] != ITEMS or call.shape[0] != ITEMS:
        return None
    if _has_blocks(value) and call.shape == (ITEMS, math.prod(value.shape[1:])):
        return numbers_at(call.build, value, 1, [*product(*map(range, value.shape[1:]))])
    if isinstance(value, Joined):
        return _view_of_joined(call.build, value, call.shape)
    part = call.build.part_of(value)
    size = part.size if part.per_user else part.shape
    if part.size[1:] != part.shape[1:]:
        part = call.build.expanded(part, (part.size[0], *part.shape[1:]))
        size = part.size
    return call.build.reshaped(part, (part.size[0], *call.shape[1:]), call.shape) if size else None


def _has_blocks(value: Value) -> bool:
    """Whether a value is side by side along two dimensions."""
    while isinstance(value, Reordered):
        value = value.source
    return isinstance(value, Joined) and any(isinstance(part, Joined) for part in value.parts)


def _view_of_joined(build: Builder, value: Joined, shape: Shape) -> Value | None:
    """Columns of several widths as rows of one width, or the other way round."""
    dim = value.dim
    if value.shape[:dim] != shape[:dim] or len(shape) <= dim:
        return _view_of_part(build, build.part_of(value), shape)
    inner, new_inner = (math.prod(size[dim + 1 :]) for size in (value.shape, shape))
    widths = [part.shape[dim] * inner for part in value.parts]
    if not new_inner or any(width % new_inner for width in widths):
        return _view_of_part(build, build.part_of(value), shape)
    parts = []
    for part, width in zip(value.parts, widths, strict=True):
        part_shape = (*shape[:dim], width // new_inner, *shape[dim + 1 :])
        parts.append(
            _view_of_joined(build, part, part_shape)
            if isinstance(part, Joined)
            else _view_of_part(build, build.part_of(part), part_shape)
        )
    return Joined(tuple(part for part in parts if part is not None), dim, shape)


def _view_of_part(build: Builder, part: Part, shape: Shape) -> Part:
    part = build.expanded(part, (part.size[0], *part.shape[1:]))
    return build.reshaped(part, (part.size[0], *shape[1:]), shape)


def cat(call: Call) -> Value | None:
    """Values side by side: they stay apart."""
    nodes: Any = call.node.args[0]
    values = [call.entries[node] for node in nodes]
    if not all(is_value(value) for value in values) or not call.shape:
        return None
    dtypes = {node.meta["val"].dtype for node in nodes}
    dim = call.dim(1, len(call.shape))
    if call.shape[dim] == ITEMS or len(dtypes) > 1:
        return None
    parts: list[Value] = []
    for value in values:
        if len(value.shape) != len(call.shape):
            return None
        parts += value.parts if isinstance(value, Joined) and value.dim == dim else [value]
    return Joined(tuple(parts), dim, call.shape)


def stack(call: Call) -> Value | None:
    """Values side by side along a dimension of their own."""
    nodes: Any = call.node.args[0]
    values = [call.entries[node] for node in nodes]
    if not all(is_value(value) for value in values):
        return None
    dim = call.dim(1, len(call.shape))
    return Joined(tuple(_unsqueezed(call.build, value, dim) for value in values), dim, call.shape)


def same(call: Call) -> Value | None:
    """The value itself."""
    return call.value(0)
