"""Which key the numbers of a JaggedTensor are of that no collection looks up, as a graph of the forward has it.

A JaggedTensor brings lengths of its own. It has a number for each id of a key where the forward puts its numbers
beside the rows of that key: side by side as they are, so that there have to be as many; found by the same lengths; or
position by position where both were padded. What an example has as many of may be a coincidence, and says nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from export.capture.bags import Bags, have_same_lengths
from export.capture.graph_nodes import has_none_of_the_numbers
from export.capture.row_counts import Input, is_lengths, symbolic_dims
from export.capture.tensor_provenance import KjtParts
from serving.bundle.scores import JaggedInput

# Of a step, by dimension: whose ids its positions are.
_Positions = Mapping[int, frozenset[str]]


@dataclass(frozen=True, slots=True)
class KeysOfInputs:
    """What is decided of numbers.

    Attributes:
        keys: by name, the key that they have a number for each id of.
        undecided: by name, why that is not known.
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
    """Read off a graph which keys numbers are of.

    Args:
        graph: of a forward. It takes lengths of each key, and of all numbers.
        inputs: what it takes. The first has a row for each sample.
        key_of: of each input with rows for ids, the key or the numbers.
        numbers: the names of what no collection looks up.
        parts: the KJTs and JaggedTensors that the forward makes of tensors of the example.
        bags: of the example.
    """
    found = _Groups(numbers)
    of_lengths: dict[tuple[str, int], str] = {}
    for part in parts:
        for number, name in enumerate(part.keys):
            found.join(of_lengths.setdefault((part.lengths, number), name), name)
    rows = _join_by_size(found, inputs, key_of)
    _join_by_lengths(found, graph, inputs, rows)
    _Padded(found, rows, next(iter(inputs)).meta["val"].shape[0]).follow(graph)
    keys, undecided = dict[str, str](), dict[str, str]()
    for name in numbers:
        of = found.keys_of(name)
        alike = [key for key in of if key in bags and have_same_lengths(bags[key], bags[name])]
        if alike:
            keys[name] = alike[0]
        elif of:
            undecided[name] = f"it is put beside rows of {of[0]!r}, and the example has more or fewer of these"
        elif several := found.several(name):
            undecided[name] = f"it is put beside rows of {' and of '.join(map(repr, several))}"
        else:
            undecided[name] = "it is put beside rows of no key"
    return KeysOfInputs(keys, undecided)


@dataclass(slots=True)
class _Groups:
    """Keys and numbers that have as many ids in each sample, as far as is known."""

    numbers: Collection[str]
    _group: dict[str, list[str]] = field(default_factory=dict)
    _met: dict[str, set[str]] = field(default_factory=dict)

    def of(self, name: str) -> list[str]:
        """The whole group of a name."""
        return self._group.setdefault(name, [name])

    def join(self, one: str, other: str) -> None:
        """Make one group of two."""
        if self.of(one) is not self.of(other):
            self._group |= dict.fromkeys(joined := [*self.of(one), *self.of(other)], joined)

    def _own_keys(self, name: str) -> list[str]:
        return [each for each in self.of(name) if each not in self.numbers]

    def meet(self, one: Collection[str], other: Collection[str]) -> None:
        """Note that positions meet: those of `one` are not yet those of any key."""
        if any(self._own_keys(name) for name in one):
            return
        keyed = [name for name in other if self._own_keys(name)]
        for name in one:
            self._met.setdefault(name, set()).update(keyed)
            if not keyed and other:
                self.join(name, min(other))

    def several(self, name: str) -> list[str]:
        """The keys, one of each group, whose positions numbers meet."""
        firsts = {self._own_keys(key)[0] for each in self.of(name) for key in self._met.get(each, ())}
        return sorted(firsts)

    def keys_of(self, name: str) -> list[str]:
        """The keys that numbers are of; none where that is not known."""
        if own := self._own_keys(name):
            return own
        firsts = self.several(name)
        return self._own_keys(firsts[0]) if len(firsts) == 1 else []


def _join_by_size(
    found: _Groups, inputs: Mapping[fx.Node, Input], key_of: Mapping[JaggedInput, str]
) -> dict[Any, str]:
    """Join what has to have as many rows, or the forward cannot be called. By size: whose rows these are."""
    rows: dict[Any, str] = {}
    for node, each in inputs.items():
        if isinstance(each, JaggedInput) and not is_lengths(each):
            for size, dim in symbolic_dims(node):
                if dim == 0:
                    found.join(rows.setdefault(size, key_of[each]), key_of[each])
    return rows


def _join_by_lengths(
    found: _Groups, graph: fx.Graph, inputs: Mapping[fx.Node, Input], rows: Mapping[Any, str]
) -> None:
    """Join rows with the lengths by which a step finds them, or makes as many."""
    made_of: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        given = inputs.get(node)
        if isinstance(given, JaggedInput):
            made_of[node] = frozenset([given.name]) if is_lengths(given) else frozenset()
            continue
        parts = [] if has_none_of_the_numbers(node) else node.all_input_nodes
        made_of[node] = frozenset[str]().union(*(made_of.get(each, frozenset()) for each in parts))
        lengths = {*made_of[node]} if len(parts) == 1 else set[str]()
        lengths.update(*(made_of[each] for each in parts if _is_integers(each) and len(made_of[each]) == 1))
        is_repeated = str(node.target).startswith("aten.repeat_interleave.")
        touched = [*(part for part in parts if _is_tensor(part)), *([node] if is_repeated else [])]
        owners = {rows[size] for each in touched for size, dim in symbolic_dims(each) if dim == 0 and size in rows}
        if len(lengths) == 1 and (len(touched) > 1 or is_repeated):
            for owner in owners:
                found.join(owner, *lengths)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_integers(node: fx.Node) -> bool:
    return _is_tensor(node) and node.meta["val"].dtype in (torch.int32, torch.int64)


_PADDING = ("fbgemm.jagged_to_padded_dense", "fbgemm.jagged_1d_to_dense", "fbgemm.jagged_2d_to_dense")
# Steps that change no position, of any dimension; they take positions from their first argument.
_IN_PLACE = (
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


class _Padded:
    """Follows whose ids the positions of padded tensors are, and notes where those of two meet.

    A step that is not known here drops the positions, which leaves the key undecided.

    Args:
        found: gets what meets.
        rows: whose rows tensors of a size have.
        samples: the number of samples.
    """

    def __init__(self, found: _Groups, rows: Mapping[Any, str], samples: Any) -> None:
        self._found, self._rows, self._samples = found, rows, samples
        self._of: dict[fx.Node, _Positions] = {}

    def follow(self, graph: fx.Graph) -> None:
        """Look at all steps, in order."""
        for node in graph.nodes:
            if node.op == "call_function" and _is_tensor(node):
                self._of[node] = {dim: names for dim, names in self._positions(node).items() if names}

    def _positions(self, node: fx.Node) -> _Positions:
        name, first = str(node.target), next(iter(node.all_input_nodes), None)
        if first is None or not _is_tensor(first):
            return {}
        if name.startswith(_PADDING):
            owner = {self._rows[size] for size, dim in symbolic_dims(first) if dim == 0 and size in self._rows}
            return {1: frozenset(owner)}
        own = self._of.get(first, {})
        if name in _PRODUCTS:
            return self._of_product(*node.all_input_nodes[:2]) if len(node.all_input_nodes) > 1 else {}
        if name == "aten.einsum.default":
            return self._of_einsum(str(node.args[0]).replace(" ", ""), node.all_input_nodes)
        if name in ("aten.cat.default", "aten.stack.default"):
            return self._of_join(node, is_stack="stack" in name)
        if name == "aten.embedding.default":
            return self._of.get(node.all_input_nodes[-1], {})
        if name in _IN_PLACE:
            last = node.meta["val"].dim() - 1
            return {dim: names for dim, names in own.items() if name != "aten.linear.default" or dim != last}
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
            return self._together(
                range(node.meta["val"].dim()), [each for each in node.all_input_nodes if _is_tensor(each)]
            )
        return {new: own[old] for new, old in _kept_dims(node, first, self._samples) if old in own}

    def _meet(self, sides: Sequence[frozenset[str]]) -> frozenset[str]:
        for number, one in enumerate(sides):
            for other in sides[number + 1 :]:
                self._found.meet(one - other, other - one)
                self._found.meet(other - one, one - other)
        return frozenset[str]().union(*sides)

    def _together(self, dims: Sequence[int], parts: Sequence[fx.Node]) -> _Positions:
        """The positions of what is put together as it broadcasts: dimensions are counted from the last."""
        missing = [len(dims) - part.meta["val"].dim() for part in parts]
        return {
            dim: self._meet(
                [self._of.get(part, {}).get(dim - by, frozenset()) for part, by in zip(parts, missing, strict=True)]
            )
            for dim in dims
        }

    def _of_join(self, node: fx.Node, *, is_stack: bool) -> _Positions:
        parts = [each for each in node.all_input_nodes if _is_tensor(each)]
        at = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        dims = parts[0].meta["val"].dim()
        at %= dims + is_stack
        sides = {dim: [self._of.get(part, {}).get(dim, frozenset()) for part in parts] for dim in range(dims)}
        if is_stack:
            return {dim + (dim >= at): self._meet(each) for dim, each in sides.items()}
        return {dim: self._meet(each) for dim, each in sides.items() if dim != at}

    def _of_product(self, one: fx.Node, other: fx.Node) -> _Positions:
        dims = [each.meta["val"].dim() for each in (one, other)]
        if min(dims) < 2:
            return {}
        left, right = self._of.get(one, {}), self._of.get(other, {})
        self._meet([left.get(dims[0] - 1, frozenset()), right.get(dims[1] - 2, frozenset())])
        last = max(dims) - 1
        return {last - 1: left.get(dims[0] - 2, frozenset()), last: right.get(dims[1] - 1, frozenset())}

    def _of_einsum(self, equation: str, parts: Sequence[fx.Node]) -> _Positions:
        given, _, answer = equation.partition("->")
        terms = given.split(",")
        if "." in equation or len(terms) != len(parts):
            return {}
        names = {
            letter: self._meet(
                [
                    self._of.get(part, {}).get(term.index(letter), frozenset())
                    for term, part in zip(terms, parts, strict=True)
                    if letter in term
                ]
            )
            for letter in dict.fromkeys("".join(terms))
        }
        return {dim: names[letter] for dim, letter in enumerate(answer)}


def _kept_dims(node: fx.Node, first: fx.Node, samples: Any) -> Iterator[tuple[int, int]]:
    """The dimensions of a step whose positions are those of a dimension of its first argument, and these."""
    name, old, new = str(node.target), first.meta["val"], node.meta["val"]
    args: Any = node.args
    if name in _VIEWS:
        yield from _kept_by_view([*old.shape], [*new.shape], samples)
    elif name == "aten.unsqueeze.default":
        at = args[1] % new.dim()
        yield from ((dim + (dim >= at), dim) for dim in range(old.dim()))
    elif name.startswith("aten.squeeze.") and len(args) > 1:
        gone = {each % old.dim() for each in (args[1] if isinstance(args[1], list | tuple) else [args[1]])}
        gone = {dim for dim in gone if isinstance(old.shape[dim], int) and old.shape[dim] == 1}
        yield from enumerate(dim for dim in range(old.dim()) if dim not in gone)
    elif name == "aten.transpose.int":
        order = list(range(old.dim()))
        one, other = args[1] % old.dim(), args[2] % old.dim()
        order[one], order[other] = order[other], order[one]
        yield from enumerate(order)
    elif name == "aten.permute.default":
        yield from enumerate(dim % old.dim() for dim in args[1])
    elif name == "aten.expand.default":
        by = new.dim() - old.dim()
        yield from ((dim + by, dim) for dim in range(old.dim()))
    elif name in _REDUCING and len(args) > 1 and args[1] is not None and new.dim() > 0:
        gone = {each % old.dim() for each in (args[1] if isinstance(args[1], list | tuple) else [args[1]])}
        kept = [dim for dim in range(old.dim()) if dim not in gone]
        yield from ((dim, dim) for dim in kept) if new.dim() == old.dim() else enumerate(kept)
    elif name == "aten.select.int":
        yield from enumerate(dim for dim in range(old.dim()) if dim != args[1] % old.dim())
    elif name == "aten.slice.Tensor":
        at = (args[1] if len(args) > 1 else 0) % old.dim()
        is_from_first = len(args) < 3 or args[2] in (0, None)
        is_each = len(args) < 5 or args[4] == 1
        yield from ((dim, dim) for dim in range(old.dim()) if dim != at or (is_from_first and is_each))


def _kept_by_view(old: Sequence[Any], new: Sequence[Any], samples: Any) -> Iterator[tuple[int, int]]:
    """As `_kept_dims`, of a view: from both ends as long as sizes are the same; samples and positions may be one.

    Dimensions of size 1 do not count.
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
