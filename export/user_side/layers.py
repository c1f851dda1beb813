"""A linear layer over a value: over each of its tensors alone, with its own columns of the weight.

What is the same for all items then takes one row. A tensor that has several places, as the item has in
`cat([item, history, item - history, item * history])`, is multiplied once, by the sum of its weights. A product of a
user's tensor and an item's becomes a weight for this user.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from export.user_side.builder import Builder
from export.user_side.cross_layers import Crossed, crossed_of, multiplied_together
from export.user_side.values import ITEMS, Joined, Part, Product, Reordered, Shape, Sum, Term, Value, Widened, changed

_ATEN = torch.ops.aten


# A layer after another one is multiplied into its weight if it makes few columns of many.
_FEW_COLUMNS, _TIMES_FEWER = 8, 4
# Columns that are just computed have a layer of their own if it makes fewer columns of them.
_TIMES_WIDER = 4


@dataclass(frozen=True, slots=True)
class _Columns:
    """A term of what a layer takes, and its weight, [H, K]."""

    term: Term
    weight: Part


def apply_linear(build: Builder, value: Value, weight: Part, bias: Part | None) -> Value:
    """A linear layer, `value @ weight.T + bias`.

    Args:
        build: the graph.
        value: [..., K].
        weight: [H, K], the same for all items.
        bias: [H], or None.
    """
    last = len(value.shape) - 1
    shape = changed(value.shape, last, weight.size[0])
    if isinstance(value, Joined) and value.dim != last:
        parts = tuple(apply_linear(build, part, weight, bias) for part in value.parts)
        return Joined(parts, value.dim, shape)
    if isinstance(value, Reordered) and value.dim != last:
        return Reordered(apply_linear(build, value.source, weight, bias), value.dim, value.order, shape)
    if isinstance(value, Part):
        if (folded := _folded(build, value, weight, bias)) is not None:
            return folded
        if value.per_user or not weight.size[0] > weight.size[1] == value.size[last]:
            return build.linear(value, weight, bias)
        widened = Widened(value, weight, shape)
        if bias is None:
            return widened
        return Sum(((1, widened), (1, build.raised(bias, shape))), shape)
    layer = _Layer(build, shape)
    for columns in _columns(build, value, weight, 1):
        layer.add(columns.term, columns.weight)
    if bias is not None:
        layer.add_row(build.raised(bias, (1,) * last + bias.size))
    return layer.value()


def _folded(build: Builder, value: Part, weight: Part, bias: Part | None) -> Part | None:
    """A layer after another layer of items, as one: the dot product of two towers. None: it would save nothing."""
    layer = build.layers.get(value.node)
    columns, width = weight.size
    if layer is None or value.per_user or columns > _FEW_COLUMNS or columns * _TIMES_FEWER > width:
        return None
    product = _product(build, weight, layer.weight)
    if layer.bias is not None:
        moved = build.reshaped(build.linear(build.reshaped(layer.bias, (1, width)), weight), (columns,))
        bias = moved if bias is None else build.total([(1, moved), (1, bias)], moved.shape)
    return build.raised(build.linear(layer.source, product, bias), (*value.shape[:-1], columns))


def _columns(build: Builder, value: Value, weight: Part, sign: int) -> Iterator[_Columns]:
    """The terms of a value with their weights."""
    last = len(value.shape) - 1
    if isinstance(value, Joined) and value.dim == last:
        start = 0
        for part in value.parts:
            width = part.shape[last]
            yield from _columns(build, part, build.cut(weight, 1, start, width), sign)
            start += width
    elif isinstance(value, Reordered) and value.dim == last:
        yield from _columns(build, value.source, _weight_of_source(build, value, weight), sign)
    elif isinstance(value, Joined | Reordered):
        yield from _columns(build, build.part_of(value), weight, sign)
    elif isinstance(value, Sum):
        of_items: dict[Shape, list[tuple[int, Part]]] = {}
        for sign_of_term, term in value.terms:
            if isinstance(term, Part):
                term = build.raised(term, value.shape)
                if not term.per_user:  # one product of matrices does for tensors of one size
                    of_items.setdefault(term.size, []).append((sign_of_term, term))
                    continue
            yield from _columns(build, term, weight, sign * sign_of_term)
        for parts in of_items.values():
            if (term_of_size := build.total(parts, value.shape)) is not None:
                yield _Columns(term_of_size, build.signed(weight, sign))
    else:
        yield _Columns(value, build.signed(weight, sign))


def _weight_of_source(build: Builder, value: Reordered, weight: Part) -> Part:
    """The weight [H, K] of reordered columns, as a weight of the columns in their own order."""
    size = (weight.size[0], value.source.shape[value.dim])
    zeros = build.call(_ATEN.new_zeros, weight.node, [*size])
    order = build.constant(torch.tensor(value.order))
    return Part(build.call(_ATEN.index_add, zeros, 1, order, weight.node), size, size, weight.per_user)


class _Layer:
    """The terms of a linear layer, sorted by what is to be done with them.

    Args:
        build: the graph.
        shape: of the answer.
    """

    def __init__(self, build: Builder, shape: tuple[int, ...]) -> None:
        self._build, self._shape, self._last = build, shape, len(shape) - 1
        self._width = shape[-1]
        self._rows: list[Part] = []  # what is the same for all items
        self._weights: dict[Any, tuple[Part, Part]] = {}  # tensors of items, with their weights, by node
        self._spread: dict[Any, tuple[Part, Part]] = {}  # with weights [L, H, K]: one for each event of a history
        self._crossed: dict[Any, list[tuple[Crossed, Part]]] = {}  # with their weights, by `Crossed.layer`

    def add_row(self, part: Part) -> None:
        """Add what is the same for all items, [..., H]."""
        self._rows.append(part)

    def add(self, term: Term, weight: Part) -> None:
        """Add a term with its weight, [H, K]."""
        build = self._build
        if isinstance(term, Widened):
            self.add(term.source, _product(build, weight, term.weight))
        elif isinstance(term, Product):
            self._add_product(term, weight)
        elif term.per_user:
            self.add_row(build.linear(build.raised(term, (*self._shape[:-1], weight.size[1])), weight))
        else:
            term = build.expanded(term, changed(term.size, self._last, weight.size[1]))
            _add_weight(build, self._weights, term, weight)

    def _add_product(self, product: Product, weight: Part) -> None:
        build, factor, other = self._build, product.factor, product.other
        if isinstance(other, Sum) and factor.per_user:
            for sign, term in other.terms:
                if isinstance(term, Product):
                    term = build.part_of(term)
                raised = build.raised(term, other.shape) if isinstance(term, Part) else term
                self.add(Product(factor, raised, product.shape), build.signed(weight, sign))
            return
        if isinstance(other, Part) and (other.per_user == factor.per_user):
            self.add(build.multiplied(factor, other), weight)
            return
        if not factor.per_user and isinstance(other, Part):
            factor, other = other, factor
        if not factor.per_user or isinstance(other, Sum):
            if (crossed := crossed_of(build, product)) is not None:
                self._crossed.setdefault(crossed.layer, []).append((crossed, weight))
            else:
                self.add(build.part_of(product), weight)
            return
        rows = factor.size[:-1]
        if all(width == 1 for width in rows):
            scaled = build.multiplied(weight, build.reshaped(factor, (factor.size[-1],)))
            self.add(other, scaled)
        elif self._is_beside_history(factor, other, weight):
            assert isinstance(other, Part)  # noqa: S101
            length, columns = factor.size[1], factor.size[2]
            of_events = build.reshaped(factor, (length, 1, columns))
            _add_weight(
                build, self._spread, other, build.multiplied(of_events, build.raised(weight, (1, *weight.size)))
            )
        else:
            self.add(build.part_of(product), weight)

    def _is_beside_history(self, factor: Part, other: Value, weight: Part) -> bool:
        """Whether a factor has [1, L, K] numbers, and a row of an item, [items, 1, K], is beside all its L rows."""
        columns = weight.size[1]
        return (
            isinstance(other, Part)
            and len(self._shape) == 3
            and factor.size[0] == 1
            and factor.size[2] == columns
            and other.size == (ITEMS, 1, columns)
        )

    def value(self) -> Value:
        """The answer of the layer."""
        build = self._build
        for node, (part, weight) in list(self._weights.items()):
            if node in self._spread:
                _, spread = self._spread[node]
                del self._weights[node]
                total = build.call(_ATEN.add, spread.node, weight.node)
                self._spread[node] = part, Part(total, spread.size, spread.shape, per_user=True)
        wide = self._add_crossed()
        row = build.total([(1, part) for part in self._rows], self._shape)
        terms: list[Part] = []
        for part, weight in self._spread.values():
            layer, row = self._spread_layer(part, weight, row)
            terms.append(layer)
        groups: dict[Any, list[tuple[Part, Part]]] = {}
        for part, weight in self._weights.values():
            groups.setdefault(part.size[:-1], []).append((part, weight))
        for group in groups.values():
            narrow = [entry for entry in group if entry[0].node not in wide]
            layers: list[Part] = []
            for entries in (narrow, *([entry] for entry in group if entry[0].node in wide)):
                if not entries:
                    continue
                bias = None
                if row is not None and row.numel == self._width:
                    bias, row = build.reshaped(row, (self._width,)), None
                parts, weights = (build.side_by_side(tensors) for tensors in zip(*entries, strict=True))
                layers.append(build.raised(build.linear(parts, weights, bias), self._shape))
            summed = build.total([(1, layer) for layer in layers], self._shape)
            if summed is not None:
                terms.append(summed)
        if row is not None:
            terms.append(build.raised(row, self._shape))
        if len(terms) == 1:
            return terms[0]
        return Sum(tuple((1, part) for part in terms), self._shape)

    def _add_crossed(self) -> set[Any]:
        """Add the products with layers. Returns the nodes that should get a layer of their own: they have so many
        columns that copying these beside other columns costs more."""
        build, wide = self._build, set()
        for crossed in self._crossed.values():
            part = multiplied_together(build, [one for one, _ in crossed])
            _add_weight(build, self._weights, part, build.side_by_side([weight for _, weight in crossed]))
            if part.size[-1] >= _TIMES_WIDER * self._width:
                wide.add(part.node)
        return wide

    def _spread_layer(self, part: Part, weight: Part, row: Part | None) -> tuple[Part, Part | None]:
        """A row of each item beside all rows of a history, [items, L, H], and what is left of `row`."""
        build, (length, width, columns) = self._build, weight.size
        bias = None
        if row is not None and row.size in ((1, length, width), (1, 1, width)):
            bias, row = build.reshaped(build.expanded(row, (1, length, width)), (length * width,)), None
        flat = build.reshaped(weight, (length * width, columns))
        layer = build.linear(build.reshaped(part, (ITEMS, columns)), flat, bias)
        return build.reshaped(layer, (ITEMS, length, width), self._shape), row


def _product(build: Builder, weight: Part, widened: Part) -> Part:
    """The weight of two layers, one after the other, [H, K]."""
    size = (weight.size[0], widened.size[1])
    return Part(build.call(_ATEN.matmul, weight.node, widened.node), size, size, per_user=True)


def _add_weight(build: Builder, weights: dict[Any, tuple[Part, Part]], part: Part, weight: Part) -> None:
    """Add a weight to what a tensor has."""
    if part.node not in weights:
        weights[part.node] = part, weight
        return
    first, total = weights[part.node]
    node = build.call(_ATEN.add, total.node, weight.node)
    weights[part.node] = first, Part(node, total.size, total.shape, per_user=True)


def sum_of_product(build: Builder, product: Product, dims: Sequence[int], size: tuple[int, ...]) -> Part | None:
    """The sum of a product over some dimensions, as a product of matrices. None: it cannot be one.

    Args:
        build: the graph.
        product: of two tensors.
        dims: the dimensions.
        size: of the answer, without these dimensions or with 1 in place of each.
    """
    first = product.factor
    rank = len(product.shape)
    if first.per_user and dims == [rank - 1] and first.size == (1,) * (rank - 1) + product.shape[-1:]:
        columns = build.part_of(apply_linear(build, product.other, build.reshaped(first, first.size[-2:]), None))
        return build.reshaped(columns, columns.size[: len(size)], size)
    second = build.part_of(product.other)
    first, second = build.raised(first, product.shape), build.raised(second, product.shape)
    letters = "abcdefgh"[:rank]
    if any(product.shape[dim] != max(first.size[dim], second.size[dim]) for dim in range(rank)):
        return None
    operands = []
    for part in (first, second):
        dims_of_part = [dim for dim in range(rank) if part.size[dim] != 1]
        operands.append(
            (
                build.reshaped(part, tuple(part.size[dim] for dim in dims_of_part)),
                "".join(letters[d] for d in dims_of_part),
            )
        )
    kept_dims = [dim for dim in range(rank) if dim not in dims and product.shape[dim] != 1]
    equation = f"{operands[0][1]},{operands[1][1]}->{''.join(letters[dim] for dim in kept_dims)}"
    node = build.graph.call_function(torch.ops.aten.einsum, (equation, [operands[0][0].node, operands[1][0].node]))
    product_size = tuple(product.shape[dim] for dim in kept_dims)
    return build.reshaped(Part(node, product_size, product_size, per_user=False), size)
