"""A dense part of the user's own, in place of what follows the collections of a model."""

import inspect
import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from export.capture.given import Given
from export.capture.graph import EMBEDDINGS
from export.scores.cut import Cut, finished
from export.scores.eager_model import model_errors
from export.scores.trace import not_tensors, tensors_of
from export.trained.running import copied, quiet
from serving.errors import ConfigurationError


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
        keys = list(named) if isinstance(answer, Mapping) else range(len(named))
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
