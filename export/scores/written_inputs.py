"""Dense parts that write to their inputs: found, and made to write to copies."""

import operator
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, fx


def writes_to_inputs(module: fx.GraphModule, inputs: Sequence[Tensor]) -> bool:
    """Whether a dense part changes a tensor that it takes. torch counts the writes to each tensor."""
    copies = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        module(*copies)
    return any(tensor._version for tensor in copies)


def copy_inputs(module: fx.GraphModule) -> None:
    """Make a dense part write to copies of its inputs."""
    for placeholder in [node for node in module.graph.nodes if node.op == "placeholder"]:
        tensor = cast_of_input(placeholder)
        with module.graph.inserting_after(tensor):
            copy = module.graph.call_method("clone", (tensor,))
        tensor.replace_all_uses_with(copy, partial(operator.is_not, copy))
    module.recompile()


def cast_of_input(placeholder: fx.Node) -> fx.Node:
    """The node that converts an input to the dtype of the other nodes, or the input itself if nothing converts it."""
    return next(
        (user for user in placeholder.users if user.target in ("float", torch.ops.aten.to)),
        placeholder,
    )
