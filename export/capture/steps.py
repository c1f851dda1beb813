"""Steps of a graph of ATen: what some do, which tensors some write to, and blocks of them in their own place."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn


def rows_read_by(argument: fx.Node) -> int | None:
    """The rows of the embedding that all integers of an input read; of several the fewest. None: there is none."""
    found = []
    for user in argument.users:
        if str(user.target) == "aten.embedding.default" and user.args[1] is argument:
            found.append(int(user.args[0].meta["val"].shape[0]))  # type: ignore[union-attr]
        elif str(user.target) in _WHOLE and (rows := rows_read_by(user)) is not None:
            found.append(rows)
    return min(found, default=None)


# Steps that hand on all numbers.
_WHOLE = (
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


def is_random(node: fx.Node) -> bool:
    """Whether a step draws random numbers. Dropout does not, in eval mode."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments = op._schema.arguments
    given: dict[str, Any] = {each.name: each.default_value for each in arguments}
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    # Dropout in eval mode, and attention without dropout, draw none.
    is_training = given.get("train", given.get("training", True))
    return bool(is_training) and given.get("dropout_p") != 0.0


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """A graph without blocks that only say whether gradients are recorded, or that nothing is cast."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        block, given = _block_of(node)
        if block is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        inner = inlined(getattr(module, str(block.target))).graph
        arguments = (each for each in inner.nodes if each.op == "placeholder")
        within = {each: copies[own] for each, own in zip(arguments, given, strict=True)}
        copies[node] = graph.graph_copy(inner, within)
    for node in [each for each in graph.nodes if each.op == "call_function" and each.target is operator.getitem]:
        if not isinstance(node.args[0], fx.Node):  # an answer of a block
            node.replace_all_uses_with(node.args[0][node.args[1]])
            graph.erase_node(node)
    return fx.GraphModule(module, graph)


def _block_of(node: fx.Node) -> tuple[Any, Sequence[Any]]:
    """The block that a step runs, and its arguments. None: it is no such step."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[1], node.args[2:]
    if node.target is torch.ops.higher_order.wrap_with_autocast and not node.args[2]:
        return node.args[4], node.args[5:]
    return None, ()


def attribute_of(module: nn.Module, path: str) -> Any:
    """What a module, or a part of it, has at a path."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


_HANDED_ON = ("aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.detach_.default")


def origin_of(node: fx.Node) -> fx.Node:
    """What a step only hands on."""
    while str(node.target) in _HANDED_ON:
        node = node.all_input_nodes[0]
    return node


# Steps that change no number: checks of torch.export, which are true of any request, and one of gradients.
_WITHOUT_EFFECT = (
    "aten.detach_.default",
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
)
# It puts the ids of keys together, which eager TorchRec has together from the start.
_JOINS = "aten.cat.default"


def is_writing(node: fx.Node) -> bool:
    """Whether a step changes a tensor in place."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and str(op) not in _WITHOUT_EFFECT and op._schema.is_mutable


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The steps whose tensors a writing step changes: those that it is given, and what they are views of."""
    waiting = _shared(node, of_writes=True)
    seen: set[fx.Node] = set()
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        yield found
        if found.target is operator.getitem or str(found.target) == _JOINS:
            waiting += found.all_input_nodes
        elif isinstance(found.target, torch._ops.OpOverload):
            waiting += _shared(found, of_writes=False)


def _shared(node: fx.Node, *, of_writes: bool) -> list[fx.Node]:
    """The arguments of an operator that it writes to; or whose memory its answer may share."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)  # noqa: S101  as `is_writing` says
    found: list[fx.Node] = []
    for number, argument in enumerate(op._schema.arguments):
        given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        about = argument.alias_info
        if about is not None and (about.is_write or not of_writes):
            found += [
                each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, fx.Node)
            ]
    return found
