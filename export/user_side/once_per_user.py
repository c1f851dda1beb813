"""Rewrite the graph of a dense part for many items of one user: what depends on the user alone takes one row.

The graph is one of torch.export, in which `linear` and `matmul` are whole. Each node becomes a value
(`export.user_side.values`). A node that no item reaches is computed as for one sample. Other nodes have rules that
keep apart what is the same for all items (`export.user_side.rules`); a node without a rule gets a row for each item,
as in the first program. Samples do not mix, so that both are the same numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from export.capture.graph_nodes import attribute_of, nodes_computing
from export.user_side.builder import Builder
from export.user_side.call import Call
from export.user_side.rules import rule_for
from export.user_side.split_graph import split_graph
from export.user_side.values import ITEMS, Joined, Part, Product, Reordered, Shape, Sum, Whole, is_value

_ATEN = torch.ops.aten
# Their rows are numbered: a row for each item is not the row of the user again.
_NUMBERED = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")


@dataclass(frozen=True, slots=True)
class UserInputs:
    """Which inputs of a dense part are the user's.

    Attributes:
        columns: of the embeddings, [first, last), in ascending order.
        inputs: the numbers of other inputs, as arguments of the dense part; the embeddings are number 0.
    """

    columns: tuple[tuple[int, int], ...]
    inputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class OncePerUser:
    """A graph for many items of one user.

    Attributes:
        user: takes the embeddings of one row, then the user's inputs for one sample. Returns a tuple of tensors.
            TorchScript compiles it, and `items`.
        items: takes the embeddings of all rows, of which it reads the items' columns, then the items' inputs, then
            what `user` returns. Returns the outputs of the dense part.
        per_user: how many operators are computed for one row, in whole or in part.
        operators: of the dense part.
        left_alone: what repeats the user's rows for each item, as a line of the model's code: what this pass does
            not know.
    """

    user: fx.GraphModule
    items: fx.GraphModule
    per_user: int
    operators: int
    left_alone: tuple[fx.Node, ...]


def once_per_user(module: fx.GraphModule, inputs: Sequence[fx.Node], user: UserInputs) -> OncePerUser:
    """Rewrite a graph.

    Args:
        module: of torch.export, without operators that write.
        inputs: its inputs, the embeddings first.
        user: which of them are the user's.
    """
    return _Rewriting(module, inputs, user).rewrite()


class _Rewriting:
    def __init__(self, module: fx.GraphModule, inputs: Sequence[fx.Node], user: UserInputs) -> None:
        self._module, self._inputs, self._user = module, inputs, user
        self.build = Builder(type(module).__name__)
        self._samples = inputs[0].meta["val"].shape[0].node.expr
        # What a node is: a value, something whole, several of them, or a number that is the same for any items.
        self._entries: dict[fx.Node, Any] = {}
        self._of_items: dict[fx.Node, Any] = {}
        self._left_alone: dict[fx.Node, None] = {}
        self._of_user: set[fx.Node] = set()
        self._per_user = 0

    def rewrite(self) -> OncePerUser:
        """The graph for many items of one user."""
        self._add_inputs()
        (output,) = (node for node in self._module.graph.nodes if node.op == "output")
        needed = nodes_computing(output)
        operators = [node for node in self._module.graph.nodes if node in needed and node.op == "call_function"]
        for node in self._module.graph.nodes:
            if node.op == "get_attr" and node in needed:
                tensor = attribute_of(self._module, str(node.target))
                self._entries[node] = self.build.constant_part(tensor.detach())
        for node in operators:
            self._entries[node] = self._entry(node)
        # Each output gets memory of its own.
        copied = [self.build.graph.call_method("contiguous", (self.items_node(node),)) for node in output.args[0]]
        self.build.graph.output(tuple(copied))
        tensors = [node for node in operators if isinstance(node.meta.get("val"), Tensor)]
        user, items = split_graph(self.build, self._of_user)
        return OncePerUser(user, items, self._per_user, len(tensors), tuple(self._left_alone))

    def _add_inputs(self) -> None:
        """Add the inputs. The embeddings are the user's columns of row 0, and other columns of all rows."""
        build = self.build
        row, rows = (self._add_input(self._inputs[0], of_user=of_user) for of_user in (True, False))
        build.count_rows_of(rows)
        width = int(self._inputs[0].meta["val"].shape[1])
        parts, start = list[Part](), 0
        for first, last in (*self._user.columns, (width, width)):
            for source, begin, end, count in ((rows, start, first, ITEMS), (row, first, last, 1)):
                if begin < end:
                    shape = (ITEMS, end - begin)
                    part = Part(source, (count, width), (ITEMS, width), per_user=count == 1)
                    parts.append(build.cut(part, 1, begin, end - begin) if shape != part.shape else part)
            start = last
        if not parts:
            parts = [Part(rows, (ITEMS, 0), (ITEMS, 0), per_user=False)]
        self._entries[self._inputs[0]] = parts[0] if len(parts) == 1 else Joined(tuple(parts), 1, (ITEMS, width))
        for number, node in enumerate(self._inputs[1:], start=1):
            of_user = number in self._user.inputs
            self._entries[node] = self._copied_entry(node, self._add_input(node, of_user=of_user), per_user=of_user)

    def _add_input(self, node: fx.Node, *, of_user: bool) -> fx.Node:
        """An input of the user's, or of the items, in the dtype of the traced one: lookups may answer in FP16."""
        placeholder = self.build.graph.placeholder(f"input_{len(self.build.graph.nodes)}")
        placeholder.type = Tensor
        if of_user:
            self._of_user.add(placeholder)
        return self.build.call(_ATEN.to, placeholder, node.meta["val"].dtype)

    def _copied_entry(self, node: fx.Node, copied: Any, *, per_user: bool) -> Any:
        """What a node is, which was copied with the user's row, or with a row for each item."""
        shape = self.shape_of(node)
        if shape is None or str(node.target) in _NUMBERED:
            return Whole(copied, per_user)
        size = tuple(1 if width == ITEMS else width for width in shape) if per_user else shape
        return Part(copied, size, shape, per_user)

    def shape_of(self, node: fx.Node) -> Shape | None:
        """The shape of a node with a row for each item, or the same for all items. None: it is no such tensor."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        shape: list[int] = []
        for size in value.shape:
            if isinstance(size, int):
                shape.append(size)
            elif size.node.expr == self._samples:
                shape.append(ITEMS)
            else:
                return None
        return tuple(shape) if shape.count(ITEMS) < 2 else None

    def _entry(self, node: fx.Node) -> Any:
        if isinstance(node.meta.get("val"), torch.SymInt):
            expression = node.meta["val"].node.expr
            if expression.free_symbols <= {self._samples}:
                return int(expression.subs(self._samples, 1))
        if (known := self._known_indices(node)) is not None:
            return known
        if self._is_per_user(node):
            self._per_user += isinstance(node.meta.get("val"), Tensor)
            return self._copied_entry(node, self._copy(node, self.user_node), per_user=True)
        rule = rule_for(node.target)
        shape = self.shape_of(node)
        if rule is not None and (shape is not None or isinstance(node.meta.get("val"), list | tuple)):
            entry = rule(Call(self.build, node, shape or (), self._entries))
            if entry is not None:
                self._per_user += any(self._has_user(self._entries[source]) for source in node.all_input_nodes)
                return entry
        return self._copied_entry(node, self.items_copy(node), per_user=False)

    def _known_indices(self, node: fx.Node) -> Part | list[Part] | None:
        """The integers that a node makes of constants, such as indices. None: it makes something else."""
        value: Any = node.meta.get("val")
        is_list = isinstance(value, list | tuple)
        results: Any = value if is_list else [value]
        if any(not isinstance(tensor, Tensor) or tensor.dtype is not torch.int64 for tensor in results):
            return None
        tensors: dict[fx.Node, Tensor] = {}
        for source in node.all_input_nodes:
            entry = self._entries[source]
            if not isinstance(entry, Part) or (tensor := self.build.known_tensor(entry)) is None:
                return None
            tensors[source] = tensor
        target: Any = node.target
        result = target(*fx.map_arg(node.args, tensors.get), **fx.map_arg(node.kwargs, tensors.get))
        if is_list:
            return [self.build.constant_part(tensor) for tensor in result]
        return self.build.constant_part(result)

    def _is_per_user(self, node: fx.Node) -> bool:
        """Whether no item reaches a node."""
        return all(
            isinstance(entry, int) or _is_of_user(entry) for entry in map(self._entries.get, node.all_input_nodes)
        )

    def _has_user(self, entry: Any) -> bool:
        """Whether a value has a tensor of the user."""
        if isinstance(entry, Joined):
            return any(map(self._has_user, entry.parts))
        if isinstance(entry, Reordered):
            return self._has_user(entry.source)
        if isinstance(entry, Sum):
            return any(self._has_user(term) for _, term in entry.terms)
        if isinstance(entry, Product):
            return self._has_user(entry.factor) or self._has_user(entry.other)
        return _is_of_user(entry) and not _is_constant(self.build, entry)

    def user_node(self, node: fx.Node) -> Any:
        """A node as one sample with the user's inputs has it."""
        entry = self._entries[node]
        if isinstance(entry, Whole):
            return entry.node
        return self.build.user_row(self.build.part_of(entry)) if is_value(entry) else entry

    def items_node(self, node: fx.Node) -> Any:
        """A node with a row for each item."""
        if node not in self._of_items:
            self._of_items[node] = self._items_node(node)
        return self._of_items[node]

    def _items_node(self, node: fx.Node) -> Any:
        entry = self._entries[node]
        if is_value(entry):
            return self.build.full(entry)
        if isinstance(entry, Whole) and not entry.per_user:
            return entry.node
        if isinstance(entry, Whole) and node.op == "placeholder":  # rows for each id of the user
            ones = [1] * (node.meta["val"].dim() - 1)
            return self.build.call(_ATEN.repeat, entry.node, [*self.build.sizes((ITEMS,)), *ones])
        return self._copy(node, self.items_node)

    def items_copy(self, node: fx.Node) -> Any:
        """A node that gets a row for each item of all that it takes."""
        if any(self._has_user(self._entries[source]) for source in node.all_input_nodes):
            self._left_alone[node] = None
        return self._copy(node, self.items_node)

    def _copy(self, node: fx.Node, argument: Callable[[fx.Node], Any]) -> Any:
        """Copy a node, with other arguments."""
        is_aten = str(node.target).startswith("aten.")

        def converted(source: fx.Node) -> Any:
            copied = argument(source)
            if not is_aten and isinstance(source.meta.get("val"), Tensor):  # FBGEMM's operators take whole rows
                return self.build.graph.call_method("contiguous", (copied,))
            return copied

        args, kwargs = fx.map_arg(node.args, converted), fx.map_arg(node.kwargs, converted)
        if str(node.target) in ("aten.view.default", "aten._unsafe_view.default"):  # repeated rows have no view
            return self.build.call(_ATEN.reshape, *args)
        return self.build.copied(node, args, kwargs)


def _is_of_user(entry: Any) -> bool:
    return isinstance(entry, Part | Whole) and entry.per_user


def _is_constant(build: Builder, entry: Any) -> bool:
    return isinstance(entry, Part) and (build.is_constant(entry) or ITEMS not in entry.shape)
