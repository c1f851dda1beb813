"""Builds the graph for one user and many items: emits operators, and puts the parts of a value together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from export.capture.torchscript_calls import TorchScriptCalls
from export.user_side.in_place import mark_pointwise
from export.user_side.values import ITEMS, Joined, Part, Product, Reordered, Shape, Sum, Value, Widened, changed

_ATEN = torch.ops.aten
_CONSTANT = "constant_"


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the graph: what it takes, its weight [H, K] and its bias [H]."""

    source: Part
    weight: Part
    bias: Part | None


class Builder:
    """The graph that is built.

    Args:
        model_name: for errors.

    Attributes:
        graph: takes the inputs of a dense part: a row of the user, and a row for each item.
        tensors: its constants, by name.
        layers: its linear layers, by the node that computes each.
        crossed: columns of products, with the products, by the ids of these (`export.user_side.cross_layers`).
    """

    def __init__(self, model_name: str) -> None:
        self.graph = fx.Graph()
        self._calls = TorchScriptCalls(self.graph, model_name)
        self.tensors: dict[str, Tensor] = {}
        self.layers: dict[fx.Node, Layer] = {}
        self.crossed: dict[tuple[int, ...], tuple[Sequence[Product], Part]] = {}
        self._constants: dict[fx.Node, Tensor] = {}
        self._items: Any = None
        # A value is put together once. The value is kept, because its id is the key.
        self._parts: dict[int, tuple[Value, Part]] = {}
        self._joined: dict[Any, fx.Node] = {}

    def count_rows_of(self, node: fx.Node) -> None:
        """Take the number of items from a tensor with a row for each."""
        self._items = self.graph.call_method("size", (node, 0))

    def constant(self, tensor: Tensor) -> fx.Node:
        """A node with a tensor that is known at export."""
        for node, known in self._constants.items():
            if known is tensor:
                return node
        name = f"{_CONSTANT}{len(self.tensors)}"
        self.tensors[name] = tensor
        node = self.graph.get_attr(name)
        self._constants[node] = tensor
        return node

    def constant_part(self, tensor: Tensor) -> Part:
        """A tensor that is known at export, as a part."""
        size = tuple(tensor.shape)
        return Part(self.constant(tensor), size, size, per_user=True)

    def is_constant(self, part: Part) -> bool:
        """Whether a tensor is known at export."""
        return part.node in self._constants

    def known_tensor(self, part: Part) -> Tensor | None:
        """The tensor of a part, if it is known at export."""
        return self._constants.get(part.node)

    def call(self, operator: Any, *args: Any) -> fx.Node:
        """An operator of torch.ops.aten. It is run now, if all its tensors are known."""
        nodes: list[fx.Node] = []
        fx.map_arg(args, nodes.append)
        if nodes and all(node in self._constants for node in nodes):
            with torch.no_grad():
                result = operator(*fx.map_arg(args, self._constants.__getitem__))
            return self.constant(result.contiguous())
        return self.graph.call_function(operator, args)

    def copied(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A node of the graph of torch.export, with other arguments."""
        return self._calls.convert(node, args, kwargs)

    def sizes(self, size: Shape) -> list[Any]:
        """A size as an argument of an operator."""
        return [self._items if width == ITEMS else width for width in size]

    def same(self, part: Part, operator: Any, *args: Any) -> Part:
        """An operator that keeps the size of a tensor."""
        return Part(self.call(operator, part.node, *args), part.size, part.shape, part.per_user)

    def reshaped(self, part: Part, size: Shape, shape: Shape | None = None) -> Part:
        """A tensor with another size, and as many numbers; `shape` is that of its value."""
        shape = size if shape is None else shape
        if size == part.size:
            return Part(part.node, size, shape, part.per_user)
        return Part(self.call(_ATEN.reshape, part.node, self.sizes(size)), size, shape, part.per_user)

    def expanded(self, part: Part, size: Shape) -> Part:
        """A tensor that is repeated to a size, without a copy."""
        if size == part.size:
            return part
        node = self.call(_ATEN.expand, part.node, self.sizes(size))
        return Part(node, size, part.shape, part.per_user)

    def raised(self, part: Part, shape: Shape) -> Part:
        """A part of a value of another shape, to which its own broadcasts."""
        missing = len(shape) - len(part.size)
        return self.reshaped(part, (1,) * missing + part.size, shape) if missing else _with_shape(part, shape)

    def cut(self, part: Part, dim: int, start: int, width: int) -> Part:
        """Adjacent indices of one dimension."""
        shape = changed(part.shape, dim, width)
        if part.size[dim] == 1 or part.size[dim] == width:
            return _with_shape(part, shape)
        node = self.call(_ATEN.narrow, part.node, dim, start, width)
        return Part(node, changed(part.size, dim, width), shape, part.per_user)

    def indexed(self, part: Part, dim: int, order: Sequence[int]) -> Part:
        """Indices of one dimension, in any order."""
        shape = changed(part.shape, dim, len(order))
        if part.size[dim] == 1 or [*order] == [*range(part.size[dim])]:
            return _with_shape(part, shape)
        node = self.call(_ATEN.index_select, part.node, dim, self.constant(torch.tensor(order)))
        return Part(node, changed(part.size, dim, len(order)), shape, part.per_user)

    def multiplied(self, first: Part, second: Part) -> Part:
        """The product of two tensors that broadcast."""
        shape = broadcast(first.shape, second.shape)
        size = broadcast(first.size, second.size)
        node = self.call(_ATEN.mul, first.node, second.node)
        mark_pointwise(node, first.size == size, second.size == size)
        return Part(node, size, shape, first.per_user and second.per_user)

    def linear(self, part: Part, weight: Part, bias: Part | None = None) -> Part:
        """A linear layer. Its input has all columns; `weight` [H, K], `bias` [H]."""
        width = weight.size[0]
        part = self.expanded(part, changed(part.size, -1 % len(part.size), weight.size[1]))
        last = len(part.size) - 1
        node = self.call(_ATEN.linear, part.node, weight.node, *([] if bias is None else [bias.node]))
        self.layers[node] = Layer(part, weight, bias)
        size, shape = changed(part.size, last, width), changed(part.shape, last, width)
        return Part(node, size, shape, part.per_user and weight.per_user)

    def part_of(self, value: Value) -> Part:
        """A value as one tensor, which broadcasts to it."""
        if isinstance(value, Part):
            return value
        if id(value) not in self._parts:
            if isinstance(value, Joined):
                part = self.joined([self.part_of(source) for source in value.parts], value.dim, value.shape)
            elif isinstance(value, Sum):
                part = self._added(value)
            elif isinstance(value, Product):
                part = self.multiplied(value.factor, self.part_of(value.other))
            elif isinstance(value, Reordered):
                part = self.indexed(self.part_of(value.source), value.dim, value.order)
            else:
                part = self.linear(value.source, value.weight)
            self._parts[id(value)] = value, _with_shape(part, value.shape)
        return self._parts[id(value)][1]

    def joined(self, parts: Sequence[Part], dim: int, shape: Shape) -> Part:
        """Tensors side by side. They are repeated as far as one of them has to be."""
        common = broadcast(*(changed(part.size, dim, 1) for part in parts))
        whole = [self.expanded(part, changed(common, dim, part.shape[dim])) for part in parts]
        if len(whole) == 1:
            return whole[0]
        size = changed(common, dim, sum(part.size[dim] for part in whole))
        key = dim, *(part.node for part in whole)
        if key not in self._joined:
            self._joined[key] = self.call(_ATEN.cat, [part.node for part in whole], dim)
        return Part(self._joined[key], size, shape, all(part.per_user for part in parts))

    def full(self, value: Value) -> fx.Node:
        """A tensor with all that a value has, a row for each item; rows are repeated without a copy."""
        part = self.part_of(value)
        return self.expanded(part, part.shape).node

    def user_row(self, part: Part) -> fx.Node:
        """A tensor of the user as one sample has it."""
        return self.expanded(part, tuple(1 if width == ITEMS else width for width in part.shape)).node

    def _added(self, value: Sum) -> Part:
        """The sum of some terms. What is the same for all items is added first, then small tensors."""
        parts = [(sign, self.raised(term, value.shape)) for sign, term in value.terms if isinstance(term, Part)]
        total = self.total([entry for entry in parts if entry[1].per_user], value.shape)
        rest = [entry for entry in parts if not entry[1].per_user]
        widened = [(sign, term) for sign, term in value.terms if isinstance(term, Widened)]
        if widened:
            layer, total = self._layer(widened, total)
            rest.append((1, self.raised(layer, value.shape)))
        products = [(sign, term) for sign, term in value.terms if isinstance(term, Product)]
        if total is None and not rest:
            sign, product = products.pop(0)
            rest = [(sign, self.raised(self.part_of(product), value.shape))]
        rest.sort(key=lambda entry: entry[1].numel)
        total = self.total([*([] if total is None else [(1, total)]), *rest], value.shape)
        assert total is not None  # noqa: S101  a sum has terms
        for sign, product in products:
            other = self.part_of(product.other)
            arguments = (total.node, product.factor.node, other.node)
            node = self.graph.call_function(_ATEN.addcmul, arguments, {} if sign > 0 else {"value": -1})
            size = broadcast(total.size, product.factor.size, other.size)
            mark_pointwise(node, total.size == size)
            total = Part(node, size, value.shape, per_user=False)
        return total

    def total(self, parts: Sequence[tuple[int, Part]], shape: Shape) -> Part | None:
        """The sum of tensors with signs, in order."""
        total: Part | None = None
        for sign, part in sorted(parts, key=lambda entry: -entry[0]) if parts and parts[0][0] < 0 else parts:
            if total is None:
                total = part if sign > 0 else self.same(part, _ATEN.neg)
                continue
            node = self.call(_ATEN.add if sign > 0 else _ATEN.sub, total.node, part.node)
            size = broadcast(total.size, part.size)
            mark_pointwise(node, total.size == size, part.size == size)
            total = Part(node, size, shape, total.per_user and part.per_user)
        return total

    def _layer(self, terms: Sequence[tuple[int, Widened]], bias: Part | None) -> tuple[Part, Part | None]:
        """Several layers as one, and what is left of a bias that it may take."""
        weights = [self.signed(term.weight, sign) for sign, term in terms]
        sources = [term.source for _, term in terms]
        width = weights[0].size[0]
        takes_bias = bias is not None and bias.numel == width
        bias_part = self.reshaped(bias, (width,)) if bias is not None and takes_bias else None
        joined = self.side_by_side(sources)
        return self.linear(joined, self.side_by_side(weights), bias_part), None if takes_bias else bias

    def signed(self, part: Part, sign: int) -> Part:
        """A tensor, or its negative."""
        return part if sign > 0 else self.same(part, _ATEN.neg)

    def side_by_side(self, parts: Sequence[Part]) -> Part:
        """The columns of some tensors, which have equally many rows."""
        last = len(parts[0].size) - 1
        shape = changed(parts[0].shape, last, sum(part.shape[last] for part in parts))
        return self.joined(parts, last, shape)


def _with_shape(part: Part, shape: Shape) -> Part:
    return part if shape == part.shape else Part(part.node, part.size, shape, part.per_user)


def broadcast(*sizes: Shape) -> Shape:
    """The size of several tensors after broadcasting."""
    return tuple(torch.broadcast_shapes(*sizes))  # type: ignore[no-untyped-call]
