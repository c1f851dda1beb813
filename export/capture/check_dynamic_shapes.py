"""Check that a graph of torch.export, which has one side of each branch, holds for any number of samples and ids."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from export.capture.branch_log import BranchLog, branches_on_ids, branches_on_one_sample, guard_on_ids, symbols_of
from export.capture.graph_nodes import attribute_of
from export.capture.row_counts import Input
from export.errors import ModelError
from export.trained.source_location import line_of
from serving.bundle.scores import JaggedInput

_VMAP_OPERATORS = ("add_batch_dim", "vmap_increment_nesting", "remove_batch_dim")
_ANY_IDS = "the same steps for any number of ids, since requests are merged"


def expect_any_number(
    model: nn.Module,
    module: fx.GraphModule,
    inputs: Sequence[Input],
    dims: Sequence[Mapping[int, Any]],
    log: BranchLog,
    trace_flipped: Callable[[Collection[int]], fx.GraphModule | None],
) -> None:
    """Refuse a forward that behaves differently for other numbers of samples or ids.

    A branch whose two sides have the same graph, such as a log line, changes no answer.

    Args:
        model: for messages.
        module: its graph.
        inputs: the inputs of the graph.
        dims: the dynamic dimensions of each input.
        log: what torch.export decided.
        trace_flipped: the graph with the other side of the branches with some indices; None if that side only
            raises an error.

    Raises:
        ModelError: naming the line.
    """

    def is_same(branches: Collection[int]) -> bool:
        other = trace_flipped(branches)
        return other is None or _are_same(module, other)

    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    _expect_any_size(model, nodes, inputs, log)
    samples = nodes[0].meta["val"].shape[0].node
    symbols = {symbol for node in nodes for symbol in symbols_of(node.meta["val"].shape)}
    if guard := guard_on_ids(samples, symbols, log.guards):
        raise _differs_by_ids(model, f"{guard[1]}: {guard[0]}")
    _expect_operators(model, module, samples.expr.free_symbols)
    of_one = branches_on_one_sample(samples, log.branches)
    if of_one and not is_same(of_one):
        raise ModelError(
            f"{type(model).__name__}: what its forward does depends on whether there is one "
            f"sample{log.branches[of_one[0]].line}: expected the same steps for any number of samples, since "
            "requests are merged"
        )
    for index in branches_on_ids(samples, log.branches, _multiples(nodes, dims, samples)):
        if not is_same([index]):
            raise _differs_by_ids(model, log.branches[index].line)


def _are_same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs have the same steps, and the same tensors in them."""
    if one.code != other.code:
        return False
    targets = [str(node.target) for node in one.graph.nodes if node.op == "get_attr"]
    pairs = ((attribute_of(one, target), attribute_of(other, target)) for target in targets)
    return all(a is b or (isinstance(a, Tensor) and torch.equal(a, b)) for a, b in pairs)


def _expect_any_size(model: nn.Module, nodes: Sequence[fx.Node], inputs: Sequence[Input], log: BranchLog) -> None:
    """Refuse a graph that takes one number of ids only."""
    for node, name in zip(nodes, inputs, strict=True):
        size = node.meta["val"].shape[0]
        if isinstance(name, JaggedInput) and not isinstance(size, torch.SymInt):
            lines = " and".join(dict.fromkeys(line for _, line in log.guards if line))
            raise ModelError(
                f"{type(model).__name__}: its forward works for {size} ids of {name.name!r} only"
                f"{lines and ': see' + lines}: use sizes of tensors (x.size(0), x.shape), not numbers of the example "
                "or lists as long as a batch"
            )


def _expect_operators(model: nn.Module, module: fx.GraphModule, samples: set[Any]) -> None:
    """Refuse nodes that behave differently for other numbers of ids. `samples`: the symbols of the batch size."""
    for node in module.graph.nodes:
        if str(getattr(node.target, "__name__", node.target)).lstrip("_") in _VMAP_OPERATORS:
            raise ModelError(
                f"{type(model).__name__}: its forward maps a function by torch.vmap{line_of(node)}, which is no "
                "operator of a graph: call the function on whole tensors: torch.matmul and torch.einsum accept the "
                "dimension of samples"
            )
        if str(node.target).startswith("aten.squeeze.") and _squeezes_ids(node, samples):
            raise _differs_by_ids(model, f"{line_of(node)}: for one id, squeeze() removes its dimension")


def _differs_by_ids(model: nn.Module, line: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__}: what its forward does depends on the number of ids{line}: expected {_ANY_IDS}"
    )


def _multiples(nodes: Sequence[fx.Node], dims: Sequence[Mapping[int, Any]], samples: Any) -> dict[Any, Any]:
    """The symbols of sizes that are a multiple of the number of samples, with that multiple."""
    is_any = torch.export.Dim.AUTO
    sizes = [node.meta["val"].shape[0].node for node, dim in zip(nodes, dims, strict=True) if dim[0] is not is_any]
    return {size._expr: size.expr for size in sizes if size.expr.free_symbols <= samples.expr.free_symbols}


def _squeezes_ids(node: fx.Node, samples: set[Any]) -> bool:
    """Whether a node removes a dimension if there is one id."""
    tensor: Any = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else range(tensor.dim())
    squeezed = dims if isinstance(dims, Sequence) else [dims]
    return bool(symbols_of([tensor.shape[dim] for dim in squeezed]) - samples)
