"""Find the key of a JaggedTensor with numbers that no collection looks up, in a graph of the forward.

The JaggedTensor has a number for each id of a key if the forward combines its numbers with the rows of that key: as
they are, so that both must be equally many; by the same lengths; or by position after padding. Equal lengths in the
example do not count, because they may be a coincidence.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from export.capture.bags import Bags, have_same_lengths
from export.capture.graph_nodes import uses_only_sizes
from export.capture.row_counts import Input, is_lengths, symbolic_dims
from export.capture.tensor_provenance import KjtParts
from serving.bundle.scores import JaggedInput

# By dimension of a node: the names for whose ids it has positions.
_Positions = Mapping[int, frozenset[str]]


@dataclass(frozen=True, slots=True)
class KeysOfInputs:
    """The keys of inputs with a number for each id.

    Attributes:
        keys: by name of an input, its key.
        undecided: by name of an input, why its key is unknown.
    """

    keys: Mapping[str, str]
    undecided: Mapping[str, str]


def find_keys_of_inputs(
    graph: fx.Graph,
    inputs: Mapping[fx.Node, Input],
    key_of: Mapping[JaggedInput, str],
    numbers: Collection[str],
    parts: Sequence[KjtParts],
    bags: Bags,
) -> KeysOfInputs:
    """Find the key of each input with a number for each id of a key.

    Args:
        graph: of a forward, which takes the lengths of each key and of all numbers.
        inputs: of the graph. The first has a row for each sample.
        key_of: the key or name of each input with rows for ids.
        numbers: the names that no collection looks up.
        parts: the tensors of the example from which the forward makes KJTs and JaggedTensors.
        bags: of the example.
    """
    groups = _Groups(numbers)
    name_of_lengths: dict[tuple[str, int], str] = {}
    for part in parts:
        for index, name in enumerate(part.keys):
            groups.join(name_of_lengths.setdefault((part.lengths, index), name), name)
    name_of_size = _join_by_size(groups, inputs, key_of)
    _join_by_lengths(groups, graph, inputs, name_of_size)
    _PaddedPositions(groups, name_of_size, next(iter(inputs)).meta["val"].shape[0]).visit(graph)
    keys, undecided = dict[str, str](), dict[str, str]()
    for name in numbers:
        candidates = groups.keys_of(name)
        fitting = [key for key in candidates if key in bags and have_same_lengths(bags[key], bags[name])]
        if fitting:
            keys[name] = fitting[0]
        elif candidates:
            undecided[name] = (
                f"it is combined with rows of {candidates[0]!r}, and the example has more or fewer of these"
            )
        elif several := groups.keys_met(name):
            undecided[name] = f"it is combined with rows of {' and of '.join(map(repr, several))}"
        else:
            undecided[name] = "it is combined with rows of no key"
    return KeysOfInputs(keys, undecided)


@dataclass(slots=True)
class _Groups:
    """Keys and numbers that must have equally many ids in each sample."""

    numbers: Collection[str]
    _groups: dict[str, list[str]] = field(default_factory=dict)
    _met: dict[str, set[str]] = field(default_factory=dict)

    def group_of(self, name: str) -> list[str]:
        """All names in the group of a name."""
        return self._groups.setdefault(name, [name])

    def join(self, one: str, other: str) -> None:
        """Merge the groups of two names."""
        if self.group_of(one) is not self.group_of(other):
            merged = [*self.group_of(one), *self.group_of(other)]
            self._groups |= dict.fromkeys(merged, merged)

    def _keys_in_group(self, name: str) -> list[str]:
        return [member for member in self.group_of(name) if member not in self.numbers]

    def meet(self, names: Collection[str], other_names: Collection[str]) -> None:
        """Record that positions of `names` are combined with those of `other_names`, unless `names` have a key."""
        if any(self._keys_in_group(name) for name in names):
            return
        keyed = [name for name in other_names if self._keys_in_group(name)]
        for name in names:
            self._met.setdefault(name, set()).update(keyed)
            if not keyed and other_names:
                self.join(name, min(other_names))

    def keys_met(self, name: str) -> list[str]:
        """The keys, one of each group, with whose positions the numbers of a name are combined."""
        return sorted(
            {self._keys_in_group(key)[0] for member in self.group_of(name) for key in self._met.get(member, ())}
        )

    def keys_of(self, name: str) -> list[str]:
        """The keys of numbers, or none if they are unknown."""
        if keys := self._keys_in_group(name):
            return keys
        met = self.keys_met(name)
        return self._keys_in_group(met[0]) if len(met) == 1 else []


def _join_by_size(
    groups: _Groups, inputs: Mapping[fx.Node, Input], key_of: Mapping[JaggedInput, str]
) -> dict[Any, str]:
    """Join inputs without equally many rows of which the forward fails. Returns a name for each number of rows."""
    name_of_size: dict[Any, str] = {}
    for node, name in inputs.items():
        if isinstance(name, JaggedInput) and not is_lengths(name):
            for size, dim in symbolic_dims(node):
                if dim == 0:
                    groups.join(name_of_size.setdefault(size, key_of[name]), key_of[name])
    return name_of_size


def _join_by_lengths(
    groups: _Groups, graph: fx.Graph, inputs: Mapping[fx.Node, Input], name_of_size: Mapping[Any, str]
) -> None:
    """Join rows with the lengths by which a node finds or repeats them."""
    lengths_in: dict[fx.Node, frozenset[str]] = {}  # the names from whose lengths a node is computed
    for node in graph.nodes:
        name = inputs.get(node)
        if isinstance(name, JaggedInput):
            lengths_in[node] = frozenset([name.name]) if is_lengths(name) else frozenset()
            continue
        arguments = [] if uses_only_sizes(node) else node.all_input_nodes
        lengths_in[node] = frozenset[str]().union(*(lengths_in.get(argument, frozenset()) for argument in arguments))
        lengths = {*lengths_in[node]} if len(arguments) == 1 else set[str]()
        lengths.update(
            *(
                lengths_in[argument]
                for argument in arguments
                if _is_integers(argument) and len(lengths_in[argument]) == 1
            )
        )
        is_repeated = str(node.target).startswith("aten.repeat_interleave.")
        tensors = [*(argument for argument in arguments if _is_tensor(argument)), *([node] if is_repeated else [])]
        names = {
            name_of_size[size]
            for tensor in tensors
            for size, dim in symbolic_dims(tensor)
            if dim == 0 and size in name_of_size
        }
        if len(lengths) == 1 and (len(tensors) > 1 or is_repeated):
            for name_of_rows in names:
                groups.join(name_of_rows, *lengths)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_integers(node: fx.Node) -> bool:
    return _is_tensor(node) and node.meta["val"].dtype in (torch.int32, torch.int64)


_PADDING = ("fbgemm.jagged_to_padded_dense", "fbgemm.jagged_1d_to_dense", "fbgemm.jagged_2d_to_dense")
# Operators that move nothing: each dimension has the positions of their first argument.
_UNMOVED = (
    "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten.layer_norm.default",
    "aten.dropout.default", "aten.clone.default", "aten.contiguous.default", "aten.detach.default",
    "aten.detach_.default", "aten.alias.default", "aten.to.dtype", "aten.to.device", "aten._to_copy.default",
    "aten.long.default", "aten.linear.default", "aten.lift_fresh_copy.default", "aten.cumsum.default",
)  # fmt: skip
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints")
_REDUCING = (
    "aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.prod.dim_int",
    "aten.logsumexp.default", "aten.any.dim", "aten.all.dim", "aten.argmax.default", "aten.norm.ScalarOpt_dim",
)  # fmt: skip
_PRODUCTS = ("aten.matmul.default", "aten.bmm.default", "aten.mm.default")


class _PaddedPositions:
    """Finds for whose ids padded tensors have positions, and records where positions of two names are combined.

    An operator without a rule here drops the positions, which leaves the key undecided.

    Args:
        groups: the names, which are joined or met.
        name_of_size: the name for each number of rows.
        samples: the number of samples.
    """

    def __init__(self, groups: _Groups, name_of_size: Mapping[Any, str], samples: Any) -> None:
        self._groups, self._name_of_size, self._samples = groups, name_of_size, samples
        self._positions: dict[fx.Node, _Positions] = {}

    def visit(self, graph: fx.Graph) -> None:
        """Visit all nodes, in order."""
        for node in graph.nodes:
            if node.op == "call_function" and _is_tensor(node):
                self._positions[node] = {dim: names for dim, names in self._positions_of(node).items() if names}

    def _positions_of(self, node: fx.Node) -> _Positions:
        name, first = str(node.target), next(iter(node.all_input_nodes), None)
        if first is None or not _is_tensor(first):
            return {}
        if name.startswith(_PADDING):
            sizes = [size for size, dim in symbolic_dims(first) if dim == 0]
            return {1: frozenset(self._name_of_size[size] for size in sizes if size in self._name_of_size)}
        of_first = self._positions.get(first, {})
        if name in _PRODUCTS:
            return self._of_product(*node.all_input_nodes[:2]) if len(node.all_input_nodes) > 1 else {}
        if name == "aten.einsum.default":
            return self._of_einsum(str(node.args[0]).replace(" ", ""), node.all_input_nodes)
        if name in ("aten.cat.default", "aten.stack.default"):
            return self._of_join(node, is_stack="stack" in name)
        if name == "aten.embedding.default":
            return self._positions.get(node.all_input_nodes[-1], {})
        if name in _UNMOVED:
            last = node.meta["val"].dim() - 1
            return {dim: names for dim, names in of_first.items() if name != "aten.linear.default" or dim != last}
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
            tensors = [argument for argument in node.all_input_nodes if _is_tensor(argument)]
            return self._of_broadcast(node.meta["val"].dim(), tensors)
        return {
            dim: of_first[first_dim]
            for dim, first_dim in _kept_dims(node, first, self._samples)
            if first_dim in of_first
        }

    def _meet(self, sides: Sequence[frozenset[str]]) -> frozenset[str]:
        """Record that positions are combined. The result has positions of all these names."""
        for number, one in enumerate(sides):
            for other in sides[number + 1 :]:
                self._groups.meet(one - other, other - one)
                self._groups.meet(other - one, one - other)
        return frozenset[str]().union(*sides)

    def _names_of(self, node: fx.Node, dim: int) -> frozenset[str]:
        return self._positions.get(node, {}).get(dim, frozenset())

    def _of_broadcast(self, dims: int, parts: Sequence[fx.Node]) -> _Positions:
        """The positions of tensors that broadcast: their dimensions are counted from the last."""
        missing = [dims - part.meta["val"].dim() for part in parts]
        return {
            dim: self._meet([self._names_of(part, dim - by) for part, by in zip(parts, missing, strict=True)])
            for dim in range(dims)
        }

    def _of_join(self, node: fx.Node, *, is_stack: bool) -> _Positions:
        parts = [argument for argument in node.all_input_nodes if _is_tensor(argument)]
        dims = parts[0].meta["val"].dim()
        joined_dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        joined_dim %= dims + is_stack
        sides = {dim: [self._names_of(part, dim) for part in parts] for dim in range(dims)}
        if is_stack:
            return {dim + (dim >= joined_dim): self._meet(names) for dim, names in sides.items()}
        return {dim: self._meet(names) for dim, names in sides.items() if dim != joined_dim}

    def _of_product(self, left: fx.Node, right: fx.Node) -> _Positions:
        left_dims, right_dims = left.meta["val"].dim(), right.meta["val"].dim()
        if min(left_dims, right_dims) < 2:
            return {}
        self._meet([self._names_of(left, left_dims - 1), self._names_of(right, right_dims - 2)])
        last = max(left_dims, right_dims) - 1
        return {last - 1: self._names_of(left, left_dims - 2), last: self._names_of(right, right_dims - 1)}

    def _of_einsum(self, equation: str, parts: Sequence[fx.Node]) -> _Positions:
        inputs, _, output = equation.partition("->")
        terms = inputs.split(",")
        if "." in equation or len(terms) != len(parts):
            return {}
        names = {
            letter: self._meet(
                [
                    self._names_of(part, term.index(letter))
                    for term, part in zip(terms, parts, strict=True)
                    if letter in term
                ]
            )
            for letter in dict.fromkeys("".join(terms))
        }
        return {dim: names[letter] for dim, letter in enumerate(output)}


def _kept_dims(node: fx.Node, first: fx.Node, samples: Any) -> Iterator[tuple[int, int]]:
    """The dimensions of a node that keep the positions of its first argument: (of the node, of the argument)."""
    name, old, new = str(node.target), first.meta["val"], node.meta["val"]
    args: Any = node.args
    dims = range(old.dim())
    if name in _VIEWS:
        yield from _kept_by_view([*old.shape], [*new.shape], samples)
    elif name == "aten.unsqueeze.default":
        added = args[1] % new.dim()
        yield from ((dim + (dim >= added), dim) for dim in dims)
    elif name.startswith("aten.squeeze.") and len(args) > 1:
        squeezed = {dim for dim in _dims_in(args[1], old) if isinstance(old.shape[dim], int) and old.shape[dim] == 1}
        yield from enumerate(dim for dim in dims if dim not in squeezed)
    elif name == "aten.transpose.int":
        order = list(dims)
        one, other = args[1] % old.dim(), args[2] % old.dim()
        order[one], order[other] = order[other], order[one]
        yield from enumerate(order)
    elif name == "aten.permute.default":
        yield from enumerate(dim % old.dim() for dim in args[1])
    elif name == "aten.expand.default":
        added = new.dim() - old.dim()
        yield from ((dim + added, dim) for dim in dims)
    elif name in _REDUCING and len(args) > 1 and args[1] is not None and new.dim() > 0:
        reduced = _dims_in(args[1], old)
        remaining = [dim for dim in dims if dim not in reduced]
        yield from ((dim, dim) for dim in remaining) if new.dim() == old.dim() else enumerate(remaining)
    elif name == "aten.select.int":
        yield from enumerate(dim for dim in dims if dim != args[1] % old.dim())
    elif name == "aten.slice.Tensor":
        sliced = (args[1] if len(args) > 1 else 0) % old.dim()
        is_from_first = len(args) < 3 or args[2] in (0, None)
        has_no_step = len(args) < 5 or args[4] == 1
        yield from ((dim, dim) for dim in dims if dim != sliced or (is_from_first and has_no_step))


def _dims_in(argument: Any, tensor: Tensor) -> set[int]:
    """The dimensions that an argument names: a number or several, which may be negative."""
    return {dim % tensor.dim() for dim in (argument if isinstance(argument, list | tuple) else [argument])}


def _kept_by_view(old: Sequence[Any], new: Sequence[Any], samples: Any) -> Iterator[tuple[int, int]]:
    """As `_kept_dims`, for a view: dimensions from both ends while their sizes are equal.

    A view may also merge the samples and the positions into one dimension, or split that dimension. Dimensions of
    size 1 are skipped.
    """
    olds, news = ([dim for dim, size in enumerate(shape) if str(size) != "1"] for shape in (old, new))
    count = 0
    while count < min(len(olds), len(news)) and str(old[olds[count]]) == str(new[news[count]]):
        yield news[count], olds[count]
        count += 1
    olds, news = olds[count:], news[count:]
    while olds and news and str(old[olds[-1]]) == str(new[news[-1]]):
        yield news.pop(), olds.pop()
    if count == 0 and len(olds) == 2 and len(news) == 1 and str(old[olds[0]]) == str(samples):
        yield news[0], olds[1]
    elif count == 0 and len(olds) == 1 and len(news) == 2 and str(new[news[0]]) == str(samples):
        yield news[1], olds[0]
