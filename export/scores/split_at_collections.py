"""Trace the forward of a model by torch.fx, and split it at its collections.

Columns of the embeddings replace the calls of collections.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torchrec import KeyedTensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import kjt_of_bags
from export.capture.graph_inputs import DenseInputs
from export.capture.stub_collections import Columns, merge_spans
from export.capture.trace import EMBEDDINGS
from export.errors import ModelError, first_line
from export.scores.dense_subgraph import WAY_OUT, DenseSubgraph, finish_subgraph
from export.scores.scriptability import expect_scriptable
from export.trained.eval_mode import evaluating, quiet
from export.trained.keyed_tracer import KeyedTracer
from export.trained.source_location import line_of, line_of_error
from export.trained.trace_to_collections import selects_ids
from export.trained.wrapped_collections import inner_of


def split_at_collections(model: nn.Module, collections: Mapping[nn.Module, Columns]) -> DenseSubgraph:
    """The dense subgraph of a model, traced by torch.fx.

    Args:
        model: the model.
        collections: where the embeddings of each are.

    Raises:
        ModelError: the forward cannot be traced or compiled; it uses ids outside of its collections; or it has an
            argument or an answer that cannot be served.
    """
    module = _trace_forward(model, collections)
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(iter(graph.nodes))):
        embeddings = graph.call_method("float", (graph.placeholder(EMBEDDINGS),))
    _expect_one_argument_for_each_key(model, module, collections)
    id_arguments = _replace_calls(module, collections, embeddings)
    _erase_selections(graph, id_arguments)
    for node in placeholders:
        has_default = bool(node.args)
        if node.name in id_arguments:
            _expect_unused(model, node)
            graph.erase_node(node)
        elif has_default and not node.users:
            graph.erase_node(node)
        elif has_default or str(node.target).startswith("*"):
            raise ModelError(
                f"{type(model).__name__}: argument {node.target!r} has a default, or stands for several: requests "
                f"have all dense inputs, by name: {WAY_OUT}"
            )
    expect_scriptable(model, graph)
    arguments = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    input_names = tuple(name for name in arguments if name != EMBEDDINGS)

    def run_model(eager_model: nn.Module, inputs: DenseInputs) -> Any:
        kjt = kjt_of_bags(inputs.bags)
        dense = dict(zip(input_names, inputs.dense, strict=True))
        return eager_model(**dict.fromkeys(id_arguments, kjt), **dense)

    return finish_subgraph(model, module, input_names, run_model)


class _Tracer(KeyedTracer):
    record_stack_traces = True

    def __init__(self, collections: Collection[nn.Module]) -> None:
        super().__init__()
        self._collections = collections

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._collections or super().is_leaf_module(m, module_qualified_name)


def _trace_forward(model: nn.Module, collections: Collection[nn.Module]) -> fx.GraphModule:
    """The whole forward as a graph, in which each call of a collection is one node.

    Raises:
        ModelError: naming the line of the model's code that cannot be traced.
    """
    with evaluating(model), quiet():
        try:
            return fx.GraphModule(model, _Tracer(collections).trace(model), type(model).__name__)
        except Exception as error:  # the model's code may raise anything
            raise ModelError(
                f"{type(model).__name__}: its forward cannot be traced{line_of_error(error)}: "
                f"{first_line(error)}: {WAY_OUT}"
            ) from error


def _calls(
    module: fx.GraphModule, collections: Mapping[nn.Module, Columns]
) -> Iterator[tuple[fx.Node, nn.Module, Columns]]:
    """The nodes that call a collection."""
    for node in list(module.graph.nodes):
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called is not None and called in collections:
            yield node, called, collections[called]


def _expect_one_argument_for_each_key(
    model: nn.Module, module: fx.GraphModule, collections: Mapping[nn.Module, Columns]
) -> None:
    """Refuse a model that looks a key up from several arguments: a request has one bag of it for each sample."""
    argument_of_key: dict[str, str] = {}
    for node, collection, _ in _calls(module, collections):
        argument = str(_argument_of_ids(node).target)
        for config in inner_of(collection)[1].embedding_bag_configs():
            for key in config.feature_names:
                if argument_of_key.setdefault(key, argument) != argument:
                    raise ModelError(
                        f"{type(model).__name__}: looks key {key!r} up from the arguments {argument_of_key[key]!r} "
                        f"and {argument!r}, a request has it once{line_of(node)}: give each argument keys of its own"
                    )


def _replace_calls(
    module: fx.GraphModule, collections: Mapping[nn.Module, Columns], embeddings: fx.Node
) -> list[str]:
    """Replace each call of a collection by columns of the embeddings, and return the arguments that had its ids."""
    graph = module.graph
    arguments: list[str] = []
    for node, collection, columns in _calls(module, collections):
        arguments.append(_argument_of_ids(node).name)
        with graph.inserting_before(node):
            parts = [
                graph.call_function(torch.narrow, (embeddings, 1, first, last - first))
                for first, last in merge_spans(columns.spans)
            ]
            pooled = parts[0] if len(parts) == 1 else graph.call_function(torch.cat, (parts, 1))
            if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
                _use_embeddings_alone(node)
            for user in [user for user in node.users if user.target == "values"]:
                user.replace_all_uses_with(pooled)
                graph.erase_node(user)
            if node.users:
                widths = [last - first for first, last in columns.spans]
                node.replace_all_uses_with(graph.call_function(KeyedTensor, (list(columns.names), widths, pooled)))
        graph.erase_node(node)
    return list(dict.fromkeys(arguments))


def _use_embeddings_alone(call: fx.Node) -> None:
    """Replace `[0]` of the answer of a collection that answers (embeddings, remapped ids) by the answer itself."""
    for user in list(call.users):
        is_element = user.op == "call_function" and user.target is operator.getitem
        if is_element and (user.args[1] == 0 or not user.users):
            user.replace_all_uses_with(call)
            call.graph.erase_node(user)
        else:
            raise ModelError(
                f"{call.target}: expected its embeddings alone to be used, [0] of its answer: remapped ids are not "
                f"served{line_of(user)}: {WAY_OUT}"
            )


def _argument_of_ids(call: fx.Node) -> fx.Node:
    """The argument of the model from which the ids of a collection are selected. That they are was checked before."""
    node = call
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node


def _erase_selections(graph: fx.Graph, id_arguments: Sequence[str]) -> None:
    """Erase the nodes that only selected ids. Other unused nodes stay: they may write to a tensor that is used."""
    selections = {node for node in graph.nodes if node.name in id_arguments}
    for node in graph.nodes:
        if selects_ids(node) and node.all_input_nodes and {*node.all_input_nodes} <= selections:
            selections.add(node)
    for node in reversed(graph.nodes):
        if node in selections and node.op != "placeholder" and not node.users:
            graph.erase_node(node)


def _expect_unused(model: nn.Module, ids: fx.Node) -> None:
    """Refuse a model that uses ids outside of its collections."""
    for user in ids.users:
        raise ModelError(
            f"{type(model).__name__}: uses {ids.target!r} beside its collections, too{line_of(user)}: {WAY_OUT}"
        )
