"""Rules for operators that compute each number from the numbers at the same index."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from export.user_side.builder import Builder, broadcast
from export.user_side.call import Call, Rule
from export.user_side.in_place import mark_pointwise, may_write_in_place
from export.user_side.shapes import cut_value, raised_value
from export.user_side.values import Joined, Part, Product, Reordered, Shape, Sum, Term, Value, Widened, is_value

_ATEN = torch.ops.aten


def pointwise(call: Call) -> Value | None:
    """Each number of the answer is computed from the numbers at the same index of the tensors that it takes."""
    nodes = call.node.all_input_nodes
    if any(not is_value(call.entries[node]) for node in nodes) or not call.shape:
        return None
    values = {node: call.entries[node] for node in nodes}
    if len(nodes) == 1:
        return _applied_alone(call, nodes[0], values[nodes[0]])
    return _applied(call, values, call.shape)


def _applied_alone(call: Call, node: fx.Node, value: Value) -> Value:
    """The operator on its only tensor: on each part alone."""
    if isinstance(value, Joined):
        parts = tuple(_applied_alone(call, node, part) for part in value.parts)
        return Joined(parts, value.dim, value.shape)
    if isinstance(value, Reordered):
        return Reordered(_applied_alone(call, node, value.source), value.dim, value.order, value.shape)
    return _applied(call, {node: value}, value.shape)


def _applied(call: Call, values: Mapping[fx.Node, Value], shape: Shape) -> Part:
    build = call.build
    parts = {node: build.part_of(value) for node, value in values.items()}
    size = broadcast(*(part.size for part in parts.values()))
    size = (1,) * (len(shape) - len(size)) + size
    first = call.node.args[0] if call.node.args else None
    if "masked_fill" in str(call.node.target) and isinstance(first, fx.Node):
        parts[first] = build.expanded(build.raised(parts[first], shape), size)
    args = fx.map_arg(call.node.args, lambda node: parts[node].node)
    kwargs = fx.map_arg(call.node.kwargs, lambda node: parts[node].node)
    copied = build.copied(call.node, args, kwargs)
    if isinstance(first, fx.Node) and may_write_in_place(call.node.target):
        mark_pointwise(copied, parts[first].size == size and first.meta["val"].dtype is call.node.meta["val"].dtype)
    return Part(copied, size, shape, all(part.per_user for part in parts.values()))


def added(sign: int) -> Rule:
    """The sum of two values, or their difference: the terms stay apart."""

    def rule(call: Call) -> Value | None:
        first, second = call.value(0), call.value(1)
        dtypes = {node.meta["val"].dtype for node in (*call.node.all_input_nodes, call.node)}
        if first is None or second is None or call.node.kwargs or len(dtypes) > 1:
            return pointwise(call)
        return _add(call.build, first, second, sign, call.shape)

    return rule


def multiplied(call: Call) -> Value | None:
    """The product of two values: a factor of the user stays apart."""
    first, second = call.value(0), call.value(1)
    if first is None or second is None or not call.node.meta["val"].dtype.is_floating_point:
        return pointwise(call)
    nodes: Any = call.node.args
    dtypes = {node.meta["val"].dtype for node in call.node.all_input_nodes}
    if len(dtypes) > 1:
        to = call.node.meta["val"].dtype
        first, second = (
            value if node.meta["val"].dtype is to else call.build.same(call.build.part_of(value), _ATEN.to, to)
            for value, node in zip((first, second), nodes, strict=False)
        )
    return _multiply(call.build, first, second, call.shape)


def _add(build: Builder, first: Value, second: Value, sign: int, shape: Shape) -> Value:
    first, second = raised_value(build, first, shape), raised_value(build, second, shape)
    if (aligned := _aligned(build, first, second)) is not None:
        dim, pairs = aligned
        return Joined(tuple(_add(build, one, other, sign, one.shape) for one, other in pairs), dim, shape)
    if (
        isinstance(first, Part)
        and isinstance(second, Part)
        and (first.size, first.per_user) == (second.size, second.per_user)
    ):
        node = build.call(_ATEN.add if sign > 0 else _ATEN.sub, first.node, second.node)
        mark_pointwise(node, True, True)
        return Part(node, first.size, shape, first.per_user)
    terms = (*_terms(first, 1), *_terms(second, sign))
    return Sum(_with_common_factors(build, terms, shape), shape)


def _terms(value: Value, sign: int) -> tuple[tuple[int, Term], ...]:
    if isinstance(value, Sum):
        return tuple((sign * sign_of_term, term) for sign_of_term, term in value.terms)
    assert not isinstance(value, Joined | Reordered)  # noqa: S101  it was aligned
    return ((sign, value),)


def _with_common_factors(
    build: Builder, terms: Sequence[tuple[int, Term]], shape: Shape
) -> tuple[tuple[int, Term], ...]:
    """Terms in which `x * a + x * b + x` is `x * (a + b + 1)`: a cross layer on top of another one."""
    factors = {
        term.factor.node: term.factor
        for _, term in terms
        if isinstance(term, Product) and isinstance(term.other, Widened | Sum)
    }
    result: list[tuple[int, Term]] = []
    for node, factor in factors.items():
        inner: list[tuple[int, Term]] = []
        for sign, term in terms:
            if isinstance(term, Product) and term.factor.node is node:
                inner += _terms(term.other, sign)
            elif isinstance(term, Part) and term.node is node:
                one = build.constant_part(torch.ones((1,) * len(shape)))
                inner.append((sign, build.raised(one, term.shape)))
        result.append((1, Product(factor, Sum(tuple(inner), shape), shape)))
    rest = [
        (sign, term)
        for sign, term in terms
        if not (
            (isinstance(term, Product) and term.factor.node in factors)
            or (isinstance(term, Part) and term.node in factors)
        )
    ]
    return (*rest, *result)


def _multiply(build: Builder, first: Value, second: Value, shape: Shape) -> Value:
    first, second = raised_value(build, first, shape), raised_value(build, second, shape)
    if (aligned := _aligned(build, first, second)) is not None:
        dim, pairs = aligned
        return Joined(tuple(_multiply(build, one, other, one.shape) for one, other in pairs), dim, shape)
    if not isinstance(first, Part):
        first, second = second, first
    if not isinstance(first, Part):
        first = build.part_of(first)
    if isinstance(second, Part):
        if first.per_user and second.per_user:
            return build.multiplied(first, second)
        return Product(second, first, shape) if second.per_user else Product(first, second, shape)
    if isinstance(second, Product) and isinstance(second.other, Part):
        one, other = second.factor, second.other
        if first.per_user == one.per_user:
            return _multiply(build, build.multiplied(first, one), other, shape)
        if first.per_user == other.per_user:
            return _multiply(build, one, build.multiplied(first, other), shape)
    if isinstance(second, Product):
        second = build.part_of(second)
        return _multiply(build, first, second, shape)
    assert not isinstance(second, Joined | Reordered)  # noqa: S101  it was aligned
    return Product(first, second, shape)


def _aligned(build: Builder, first: Value, second: Value) -> tuple[int, list[tuple[Value, Value]]] | None:
    """Two values of one shape, of which one is joined: the dimension, and pairs that are side by side along it."""
    joined = first if isinstance(first, Joined) else second
    if not isinstance(joined, Joined):
        return None
    dim = joined.dim
    pairs: list[tuple[Value, Value]] = []
    start = 0
    for part in joined.parts:
        width = part.shape[dim]
        other = second if joined is first else first
        cut = cut_value(build, other, dim, start, width)
        pairs.append((part, cut) if joined is first else (cut, part))
        start += width
    return dim, pairs
