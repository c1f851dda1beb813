"""Split a graph in two: what takes the user's inputs alone, and the rest."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from export.user_side.builder import Builder
from export.user_side.in_place import write_in_place


def split_graph(build: Builder, of_user: set[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph.

    Args:
        build: the graph.
        of_user: its inputs that are the user's.

    Returns:
        A graph that takes these inputs and returns a tuple of tensors; and one that takes the other inputs, then
        these tensors, and returns what the whole graph does.
    """
    output = next(node for node in build.graph.nodes if node.op == "output")
    for node in reversed(list(build.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            build.graph.erase_node(node)
    on_user = set(of_user)
    # What takes nothing, such as a constant, is in both graphs if both take it.
    of_none = {
        node for node in build.graph.nodes if not node.all_input_nodes and node.op in ("get_attr", "call_function")
    }
    for node in build.graph.nodes:
        sources = {*node.all_input_nodes} - of_none
        if sources and sources <= on_user and node is not output:
            on_user.add(node)
    crossing = [
        node for node in build.graph.nodes if node in on_user and any(user not in on_user for user in node.users)
    ]
    user, items = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in build.graph.nodes:
        if node in on_user or node in of_none:
            copies[node] = user.node_copy(node, copies.__getitem__)
    user.output(tuple(copies[node] for node in crossing))
    copies = {}
    for node in build.graph.nodes:
        if node.op == "placeholder" and node not in on_user:
            copies[node] = items.node_copy(node, copies.__getitem__)
    for number, node in enumerate(crossing):
        copies[node] = items.placeholder(f"of_user_{number}")
        copies[node].type = Tensor
    for node in build.graph.nodes:
        if node not in on_user and node.op != "placeholder":
            copies[node] = items.node_copy(node, copies.__getitem__)
    write_in_place(items)
    return _module(build.tensors, user, "User"), _module(build.tensors, items, "Items")


def _module(tensors: Mapping[str, Tensor], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph with the constants that it takes."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)
    named = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    graph.lint()
    return fx.GraphModule(
        {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items() if name in named},
        graph,
        name,
    )
