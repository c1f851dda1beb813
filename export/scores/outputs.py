"""The names of what a model answers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from export.errors import ModelError
from export.scores.trace import WAY_OUT

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
