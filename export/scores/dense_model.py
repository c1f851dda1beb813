"""What follows the collections of a model: as torch.fx follows it, as an example shows, or of the user's own."""

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
from export.scores.dense_inputs import inputs_of
from export.scores.eager_model import model_errors
from export.scores.probe_inputs import probe_inputs, probe_request, request_of, spans_of
from export.scores.split_at_collections import WAY_OUT, DenseSubgraph, finished, split_at_collections
from export.scores.trace_example import trace_example
from export.trained.managed import is_sequence
from export.trained.running import copied, quiet
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput
from serving.errors import ConfigurationError
from serving.requests.types import Ids, Tensors


@dataclass(frozen=True, slots=True)
class DenseModel:
    """What follows the collections of a model, before it is given its weights.

    Attributes:
        path: of `entry` in the module that was given.
        entry: the model around the collections; or a module of the user's own.
        cut: of it.
        inputs: its dense inputs.
        request: ids of all keys, to try it with.
        given: the same request, with dense inputs, and random embeddings and rows.
        notes: what of an example requests do not bring.
    """

    path: str
    entry: nn.Module
    cut: DenseSubgraph
    inputs: tuple[DenseInput, ...]
    request: Tensors
    given: DenseInputs
    notes: tuple[str, ...] = ()


def dense_model_of_module(
    trained: Trained, manifest: Manifest, known: Mapping[str, Ids], widths: Mapping[str, int], own: nn.Module
) -> DenseModel:
    """A module of the user's own, in place of what follows; arguments as `export.scores.dense_part.dense_part`."""
    _expect_pooled(trained)
    found = around(own, spans_of(manifest), widths)
    inputs, request = inputs_of(found, widths), probe_request(manifest, None, known)
    return DenseModel("", own, found, inputs, request, probe_inputs(manifest, request, inputs))


def dense_model_of_example(
    trained: Trained, manifest: Manifest, columns: Collections, example: Example
) -> DenseModel:
    """What follows, as torch.export followed the model from a call of it; arguments likewise."""
    followed = trace_example(trained.module, columns, example)
    found, inputs, notes = followed.cut(trained.module)
    given = followed.given(found)
    return DenseModel("", trained.module, found, inputs, request_of(manifest, given.bags), given, tuple(notes))


def dense_model_of_forward(
    trained: Trained,
    manifest: Manifest,
    known: Mapping[str, Ids],
    widths: Mapping[str, int],
    columns: Collections,
) -> DenseModel:
    """What follows, as torch.fx followed the model; arguments likewise."""
    _expect_pooled(trained)
    path, entry = _entry(trained)
    found = split_at_collections(entry, columns)
    inputs, request = inputs_of(found, widths), probe_request(manifest, None, known)
    notes = tuple(renamed_outputs(found.outputs))
    return DenseModel(path, entry, found, inputs, request, probe_inputs(manifest, request, inputs), notes)


def _entry(trained: Trained) -> tuple[str, nn.Module]:
    """The model around the collections, and its path in the module that was given."""
    entries = [each.module for each in trained.found.entries]
    if len(entries) != 1 or entries[0] in trained.found.collections.values():
        found = ", ".join(type(each).__name__ for each in entries)
        raise ModelError(
            f"{type(trained.module).__name__}: expected one module around all collections, with scores, found "
            f"{found}: give that module, or export without --scores"
        )
    (path,) = (name for name, each in trained.module.named_modules() if each is entries[0])
    return path, entries[0]


def _expect_pooled(trained: Trained) -> None:
    for name, collection in trained.found.collections.items():
        if is_sequence(collection):
            raise ModelError(
                f"{name} ({type(collection).__name__}): scores are made of rows that are not pooled: give an example "
                "of a call: export_model(example=(…)), --example package.module:function"
            )


def around(own: nn.Module, spans: Mapping[str, tuple[int, int]], widths: Mapping[str, int]) -> DenseSubgraph:
    """`own` behind the embeddings of a lookup, side by side.

    Args:
        own: takes embeddings by feature, and dense inputs by name. It is one step: TorchScript reads its forward.
        spans: the columns of each feature, [first, last).
        widths: of all its dense inputs.

    Raises:
        ModelError: it cannot be run, or its answers are no tensors.
        ConfigurationError: the width of an input is not known.
    """
    _, *arguments = inspect.signature(own.forward).parameters
    if unknown := [name for name in arguments if name not in widths]:
        raise ConfigurationError(
            f"dense_widths (--dense-width): expected the width of {unknown[0]!r}, which {type(own).__name__} takes"
        )
    own = copied(own, ()).eval()
    answer = _tried(own, spans, [widths[name] for name in arguments])
    graph = fx.Graph()
    embeddings = graph.call_method("float", (graph.placeholder(EMBEDDINGS),))
    given = [graph.placeholder(name) for name in arguments]
    pooled = {
        name: graph.call_function(operator.getitem, (embeddings, (slice(None), slice(first, last))))
        for name, (first, last) in spans.items()
    }
    named_outputs(own, answer, Tensor, WAY_OUT)
    graph.output(_parts_of(answer, graph.call_module("own", (pooled, *given))))

    def answer_of(model: nn.Module, given: DenseInputs) -> object:
        pooled = {name: given.embeddings[:, first:last] for name, (first, last) in spans.items()}
        return model(pooled, *given.dense)

    return finished(own, fx.GraphModule({"own": own}, graph, type(own).__name__), tuple(arguments), answer_of)


def _parts_of(answer: object, node: fx.Node) -> Any:
    """The answer that `node` computes, with a node in place of each tensor of it."""

    def part_of(key: Any, part: object) -> Any:
        return _parts_of(part, node.graph.call_function(operator.getitem, (node, key)))

    if isinstance(answer, Mapping):
        return {key: part_of(key, part) for key, part in answer.items()}
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return {name: part_of(number, getattr(answer, name)) for number, name in enumerate(answer._fields)}
    if isinstance(answer, tuple | list):
        return [part_of(number, part) for number, part in enumerate(answer)]
    return node


def _tried(own: nn.Module, spans: Mapping[str, tuple[int, int]], widths: list[int]) -> object:
    """What `own` answers for two samples."""
    pooled = {name: torch.zeros(2, last - first) for name, (first, last) in spans.items()}
    what = "expected a forward of embeddings by feature and dense inputs, it fails"
    with torch.no_grad(), quiet(), model_errors(own, what):
        return own(pooled, *(torch.zeros(2, width) for width in widths))
