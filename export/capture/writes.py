"""Steps of a graph of ATen that write to tensors, and which tensors those are."""

import operator
from collections.abc import Iterator

import torch
from torch import fx

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
