"""The dense model of an export: traced without an example, traced with one, or a module of the user's own."""

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from export.capture.graph_inputs import DenseInputs
from export.capture.output_names import named_outputs, renamed_outputs
from export.capture.stub_collections import Collections
from export.capture.trace import EMBEDDINGS
from export.config import Example
from export.errors import ModelError
from export.scores.dense_subgraph import WAY_OUT, DenseSubgraph, finish_subgraph, model_errors
from export.scores.find_dense_inputs import find_dense_inputs
from export.scores.probe_inputs import probe_inputs, probe_request, request_of_bags
from export.scores.split_at_collections import split_at_collections
from export.scores.trace_example import trace_example
from export.trained.eval_mode import quiet
from export.trained.model_copy import copy_model
from export.trained.tables import Trained
from export.trained.wrapped_collections import is_sequence
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput
from serving.errors import ConfigurationError
from serving.requests.types import Ids, Tensors


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense subgraph of a model, before it gets the weights that serve, and a probe to run it on.

    Attributes:
        path: the path of `model` in the module that the caller passed.
        model: the model around the collections, or a module of the user's own.
        subgraph: the dense subgraph of the model.
        dense_inputs: its dense inputs.
        request: ids of all keys, as a probe.
        inputs: the same request with dense inputs, random embeddings and random rows.
        notes: a line for each part of an example that requests do not bring.
    """

    path: str
    model: nn.Module
    subgraph: DenseSubgraph
    dense_inputs: tuple[DenseInput, ...]
    request: Tensors
    inputs: DenseInputs
    notes: tuple[str, ...] = ()


def dense_model_of_module(
    trained: Trained,
    manifest: Manifest,
    known_ids: Mapping[str, Ids],
    widths: Mapping[str, int],
    user_module: nn.Module,
) -> DenseModel:
    """A module of the user's own, in place of the layers of the model.

    Args:
        trained: the model, whose collections all pool.
        manifest: of the bundle.
        known_ids: known ids of each key with a map.
        widths: of all dense inputs of `user_module`, by name.
        user_module: takes embeddings by feature, and dense inputs by name.

    Raises:
        ModelError: a collection does not pool; `user_module` cannot be run; or its answer has no tensors.
        ConfigurationError: the width of an input is not known.
    """
    _expect_pooled(trained)
    subgraph = _wrap_module(user_module, manifest.pooled_columns, widths)
    dense_inputs = find_dense_inputs(subgraph, widths)
    request = probe_request(manifest, None, known_ids)
    return DenseModel("", user_module, subgraph, dense_inputs, request, probe_inputs(manifest, request, dense_inputs))


def dense_model_of_example(
    trained: Trained, manifest: Manifest, columns: Collections, example: Example
) -> DenseModel:
    """The layers of a model, traced by torch.export from one call of it.

    Args:
        trained: the model.
        manifest: of the bundle.
        columns: the columns of each of its collections.
        example: the call.

    Raises:
        ModelError: the model cannot be traced or served, naming the line.
    """
    traced = trace_example(trained.module, columns, example)
    subgraph, dense_inputs, notes = traced.split(trained.module)
    inputs = traced.probe_inputs(subgraph)
    request = request_of_bags(manifest, inputs.bags)
    return DenseModel("", trained.module, subgraph, dense_inputs, request, inputs, tuple(notes))


def dense_model_of_forward(
    trained: Trained,
    manifest: Manifest,
    known_ids: Mapping[str, Ids],
    widths: Mapping[str, int],
    columns: Collections,
) -> DenseModel:
    """The layers of a model, traced by torch.fx, without an example.

    Args:
        trained: the model, whose collections all pool.
        manifest: of the bundle.
        known_ids: known ids of each key with a map.
        widths: of dense inputs that no nn.Linear takes, by name.
        columns: the columns of each of its collections.

    Raises:
        ModelError: the model cannot be traced or served, naming the line.
        ConfigurationError: the width of an input is not known.
    """
    _expect_pooled(trained)
    path, model = _model_around_collections(trained)
    subgraph = split_at_collections(model, columns)
    dense_inputs = find_dense_inputs(subgraph, widths)
    request = probe_request(manifest, None, known_ids)
    inputs = probe_inputs(manifest, request, dense_inputs)
    notes = tuple(renamed_outputs(subgraph.output_names))
    return DenseModel(path, model, subgraph, dense_inputs, request, inputs, notes)


def _model_around_collections(trained: Trained) -> tuple[str, nn.Module]:
    """The path and the module of the one model around all collections."""
    entries = [entry.module for entry in trained.entries]
    if len(entries) != 1 or entries[0] in trained.collections.values():
        kinds = ", ".join(type(entry).__name__ for entry in entries)
        raise ModelError(
            f"{type(trained.module).__name__}: expected one module around all collections, with scores, found "
            f"{kinds}: give that module, or export without --scores"
        )
    (path,) = (name for name, module in trained.module.named_modules() if module is entries[0])
    return path, entries[0]


def _expect_pooled(trained: Trained) -> None:
    for name, collection in trained.collections.items():
        if is_sequence(collection):
            raise ModelError(
                f"{name} ({type(collection).__name__}): scores are made of rows that are not pooled: give an example "
                "of a call: export_model(example=(…)), --example package.module:function"
            )


def _wrap_module(
    user_module: nn.Module, spans: Mapping[str, tuple[int, int]], widths: Mapping[str, int]
) -> DenseSubgraph:
    """The dense subgraph that calls `user_module` with the embeddings of each feature.

    The call is one node: TorchScript compiles the forward of `user_module` itself.

    Args:
        user_module: takes embeddings by feature, and dense inputs by name.
        spans: the columns of each feature in the embeddings, [first, last).
        widths: of all its dense inputs.
    """
    _, *arguments = inspect.signature(user_module.forward).parameters
    if unknown := [name for name in arguments if name not in widths]:
        raise ConfigurationError(
            f"dense_widths (--dense-width): expected the width of {unknown[0]!r}, which "
            f"{type(user_module).__name__} takes"
        )
    user_module = copy_model(user_module, ()).eval()
    answer = _answer_for_two_samples(user_module, spans, [widths[name] for name in arguments])
    named_outputs(user_module, answer, Tensor, WAY_OUT)  # refuses an answer without tensors
    graph = fx.Graph()
    embeddings = graph.call_method("float", (graph.placeholder(EMBEDDINGS),))
    dense = [graph.placeholder(name) for name in arguments]
    pooled = {
        name: graph.call_function(operator.getitem, (embeddings, (slice(None), slice(first, last))))
        for name, (first, last) in spans.items()
    }
    graph.output(_nodes_of_answer(answer, graph.call_module("own", (pooled, *dense))))

    def run_module(module: nn.Module, inputs: DenseInputs) -> object:
        by_feature = {name: inputs.embeddings[:, first:last] for name, (first, last) in spans.items()}
        return module(by_feature, *inputs.dense)

    module = fx.GraphModule({"own": user_module}, graph, type(user_module).__name__)
    return finish_subgraph(user_module, module, tuple(arguments), run_module)


def _nodes_of_answer(answer: object, node: fx.Node) -> Any:
    """The structure of `answer`, which `node` computes, with a node in place of each tensor."""

    def nodes_of_part(key: Any, part: object) -> Any:
        return _nodes_of_answer(part, node.graph.call_function(operator.getitem, (node, key)))

    if isinstance(answer, Mapping):
        return {key: nodes_of_part(key, part) for key, part in answer.items()}
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return {name: nodes_of_part(number, answer[number]) for number, name in enumerate(answer._fields)}
    if isinstance(answer, tuple | list):
        return [nodes_of_part(number, part) for number, part in enumerate(answer)]
    return node


def _answer_for_two_samples(
    user_module: nn.Module, spans: Mapping[str, tuple[int, int]], widths: list[int]
) -> object:
    """What `user_module` answers for two samples of zeros."""
    pooled = {name: torch.zeros(2, last - first) for name, (first, last) in spans.items()}
    failure = "expected a forward of embeddings by feature and dense inputs, it fails"
    with torch.no_grad(), quiet(), model_errors(type(user_module).__name__, failure):
        return user_module(pooled, *(torch.zeros(2, width) for width in widths))
