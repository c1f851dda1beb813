"""Properties of the nodes in an ATen graph: how they change numbers, and which tensors they write to."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

CAT = "aten.cat.default"
OFFSETS = "fbgemm.asynchronous_complete_cumsum.default"
# Operators that pass all numbers of an integer input on.
_PASSING = (
    "aten.to.dtype",
    "aten.to.device",
    "aten.view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.default",
    "aten.flatten.using_ints",
    "aten.contiguous.default",
    "aten.long.default",
)
# Operators whose result is their first argument, for `origin_of`.
_ALIASES = ("aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.detach_.default")
# Operators that change no number although their schema says so: checks of torch.export, which every request passes,
# and `detach_`.
_WITHOUT_EFFECT = (
    "aten.detach_.default",
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
)
# Operators that take the size, dtype or device of a tensor, and none of its numbers.
_ONLY_SIZES = (
    "_like.default", "new_ones.default", "new_full.default", "new_zeros.default", "sym_size.int", "sym_numel.default",
)  # fmt: skip


def answers_of(graph: fx.Graph) -> list[fx.Node]:
    """The answers of a graph of torch.export, in order."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return _nodes_in(output.args[0])


def _nodes_in(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        # The graph of torch.export ends in a call that puts its answers into a tuple.
        is_tuple = value.op == "call_function" and "tree_unflatten" in str(value.target)
        return _nodes_in(value.args[0]) if is_tuple else [value]
    return [node for part in value or () for node in _nodes_in(part)] if isinstance(value, list | tuple) else []


def attribute_of(module: nn.Module, path: str) -> Any:
    """The attribute at a path of a module, such as "layer.weight"."""
    return operator.attrgetter(path)(module)


def rows_read_by(argument: fx.Node) -> int | None:
    """The rows of the embedding that all integers of an input index; the fewest of several, or None."""
    rows = []
    for user in argument.users:
        if str(user.target) == "aten.embedding.default" and user.args[1] is argument:
            rows.append(int(user.args[0].meta["val"].shape[0]))  # type: ignore[union-attr]
        elif str(user.target) in _PASSING and (count := rows_read_by(user)) is not None:
            rows.append(count)
    return min(rows, default=None)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and draws_random_numbers(
        node.target, node.args, node.kwargs
    )


def draws_random_numbers(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers. Dropout in eval mode, and attention without it, do not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments: dict[str, Any] = {argument.name: argument.default_value for argument in op._schema.arguments}
    arguments |= {**dict(zip(arguments, args, strict=False)), **kwargs}
    is_training = arguments.get("train", arguments.get("training", True))
    rate = arguments.get("p") if "dropout" in str(op) else arguments.get("dropout_p")
    return bool(is_training) and rate != 0.0


def uses_only_sizes(node: fx.Node) -> bool:
    """Whether a node takes the sizes of tensors, and none of their numbers."""
    return str(node.target).endswith(_ONLY_SIZES)


def origin_of(node: fx.Node) -> fx.Node:
    """The node whose result a node only passes on."""
    while str(node.target) in _ALIASES:
        node = node.all_input_nodes[0]
    return node


def is_writing(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and str(op) not in _WITHOUT_EFFECT and op._schema.is_mutable


def is_copy(node: fx.Node) -> bool:
    """Whether a node makes a copy because the model's code asks for one."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return str(node.target) == "aten._to_copy.default" or bool(arguments.get("copy"))


def written_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose tensors a writing node changes: written arguments, and tensors that share their memory."""
    waiting = _aliased_arguments(node, of_writes=True)
    visited: set[fx.Node] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor in visited:
            continue
        visited.add(tensor)
        yield tensor
        # Eager TorchRec joins the ids of keys when it makes a KJT, so its keys are views of what a graph joins.
        if tensor.target is operator.getitem or str(tensor.target) == CAT:
            waiting += tensor.all_input_nodes
        elif isinstance(tensor.target, torch._ops.OpOverload):
            waiting += _aliased_arguments(tensor, of_writes=False)


def _aliased_arguments(node: fx.Node, *, of_writes: bool) -> list[fx.Node]:
    """The arguments that an operator writes to; or, with `of_writes` False, whose memory its result may share."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)  # noqa: S101  as `is_writing` says
    nodes: list[fx.Node] = []
    for index, argument in enumerate(op._schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not of_writes):
            values = value if isinstance(value, list | tuple) else [value]
            nodes += [tensor for tensor in values if isinstance(tensor, fx.Node)]
    return nodes


def nodes_computing(output: fx.Node) -> set[fx.Node]:
    """The nodes that an output is computed from, itself included."""
    needed: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed
