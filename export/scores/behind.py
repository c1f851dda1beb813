"""What follows the collections of a model: as torch.fx follows it, as an example shows, or of the user's own."""

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from export.capture.example import said_of_names
from export.capture.given import Given
from export.capture.graph import EMBEDDINGS
from export.capture.stand_ins import Collections
from export.config import Example
from export.errors import ModelError
from export.scores.cut import Cut, cut, finished, not_tensors, tensors_of
from export.scores.cut_example import follow_example
from export.scores.dense_inputs import inputs_of
from export.scores.eager_model import model_errors
from export.scores.requests import given_for, request_for, request_of, spans_of
from export.trained.managed import is_sequence
from export.trained.running import copied, quiet
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput
from serving.errors import ConfigurationError
from serving.request.tensors import Ids, Tensors


@dataclass(frozen=True, slots=True)
class Behind:
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
    cut: Cut
    inputs: tuple[DenseInput, ...]
    request: Tensors
    given: Given
    notes: tuple[str, ...] = ()


def behind_own(
    trained: Trained, manifest: Manifest, known: Mapping[str, Ids], widths: Mapping[str, int], own: nn.Module
) -> Behind:
    """A module of the user's own, in place of what follows; arguments as `export.scores.dense_part.dense_part`."""
    _expect_pooled(trained)
    found = around(own, spans_of(manifest), widths)
    inputs, request = inputs_of(found, widths), request_for(manifest, None, known)
    return Behind("", own, found, inputs, request, given_for(manifest, request, inputs))


def behind_example(trained: Trained, manifest: Manifest, columns: Collections, example: Example) -> Behind:
    """What follows, as torch.export followed the model from a call of it; arguments likewise."""
    followed = follow_example(trained.module, columns, example)
    found, inputs, notes = followed.cut(trained.module)
    given = followed.given(found)
    return Behind("", trained.module, found, inputs, request_of(manifest, given.bags), given, tuple(notes))


def behind_forward(
    trained: Trained,
    manifest: Manifest,
    known: Mapping[str, Ids],
    widths: Mapping[str, int],
    columns: Collections,
) -> Behind:
    """What follows, as torch.fx followed the model; arguments likewise."""
    _expect_pooled(trained)
    path, entry = _entry(trained)
    found = cut(entry, columns)
    inputs, request = inputs_of(found, widths), request_for(manifest, None, known)
    notes = tuple(said_of_names(found.outputs))
    return Behind(path, entry, found, inputs, request, given_for(manifest, request, inputs), notes)


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


def around(own: nn.Module, spans: Mapping[str, tuple[int, int]], widths: Mapping[str, int]) -> Cut:
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
    called = graph.call_module("own", (pooled, *given))
    named = tensors_of(answer)
    if not named:
        raise not_tensors(own, type(answer).__name__)
    if isinstance(answer, Tensor):
        graph.output(called)
    else:
        keys = list(answer) if isinstance(answer, Mapping) else range(len(named))
        pieces = [graph.call_function(operator.getitem, (called, key)) for key in keys]
        graph.output(dict(zip(named, pieces, strict=True)))

    def answer_of(model: nn.Module, given: Given) -> object:
        pooled = {name: given.embeddings[:, first:last] for name, (first, last) in spans.items()}
        return model(pooled, *given.dense)

    return finished(own, fx.GraphModule({"own": own}, graph, type(own).__name__), tuple(arguments), answer_of)


def _tried(own: nn.Module, spans: Mapping[str, tuple[int, int]], widths: list[int]) -> object:
    """What `own` answers for two samples."""
    pooled = {name: torch.zeros(2, last - first) for name, (first, last) in spans.items()}
    what = "expected a forward of embeddings by feature and dense inputs, it fails"
    with torch.no_grad(), quiet(), model_errors(own, what):
        return own(pooled, *(torch.zeros(2, width) for width in widths))
