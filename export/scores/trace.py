"""Follow the forward of a model, its collections as single steps. What cannot be followed is refused by its line."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, fx, nn

from export.errors import ModelError, first_line
from export.trained.keyed import KeyedTracer, line_of_error
from export.trained.running import evaluating, quiet

WAY_OUT = (
    "give an example of a call (example=…, --example) if you gave none, or dense=…, a module of your own that takes "
    "pooled embeddings, or export without --scores"
)


def traced(entry: nn.Module, collections: Collection[nn.Module]) -> fx.GraphModule:
    """The whole forward of `entry` as a graph. Its modules are those of `entry`.

    Args:
        entry: the model.
        collections: each call of one is a node.

    Raises:
        ModelError: naming the line of the model's code that cannot be followed.
    """
    with evaluating(entry), quiet():
        try:
            return fx.GraphModule(entry, _Tracer(collections).trace(entry), type(entry).__name__)
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"{type(entry).__name__}: its forward cannot be followed{line_of_error(error)}: "
                f"{first_line(error)}: {WAY_OUT}"
            ) from error


class _Tracer(KeyedTracer):
    record_stack_traces = True

    def __init__(self, collections: Collection[nn.Module]) -> None:
        super().__init__()
        self._collections = collections

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._collections or super().is_leaf_module(m, module_qualified_name)


# The name of a model's only output; several without names are numbered.
_SCORES = "scores"


def tensors_of(answer: Any, kind: type = Tensor) -> dict[str, Any]:
    """The tensors of an answer by name: one alone is `scores`, those of a tuple are `scores_0` and so on, those of a
    dict or a named tuple have its names. None where there is anything else among them.

    Args:
        answer: of a model; or of a graph.
        kind: what stands for a tensor.
    """
    if isinstance(answer, kind):
        return {_SCORES: answer}
    if isinstance(answer, Mapping):
        named = dict(answer)
    elif isinstance(answer, tuple) and hasattr(answer, "_fields"):
        named = dict(zip(answer._fields, answer, strict=True))
    elif isinstance(answer, tuple | list):
        named = {f"{_SCORES}_{number}": each for number, each in enumerate(answer)}
    else:
        return {}
    return named if all(isinstance(name, str) and isinstance(each, kind) for name, each in named.items()) else {}


def not_tensors(model: nn.Module, got: str) -> ModelError:
    """The error for an answer that `tensors_of` finds no tensors in."""
    return ModelError(
        f"{type(model).__name__}: expected a tensor, or tensors as a tuple or by name, as its answer, got {got}: "
        f"{WAY_OUT}"
    )
