"""The names of a model's outputs, with and without an example."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from export.errors import ModelError
from serving.bundle.scores import RESERVED

# The name of a model's only output; several without names are numbered.
_SCORES = "scores"

Output = TypeVar("Output")


def named_outputs(
    model: nn.Module, answer: Any, kind: type[Output], advice: str = ""
) -> tuple[dict[str, Output], list[str]]:
    """Name the tensors of an answer, and list the names of KeyedJaggedTensors in it.

    A single tensor is `scores`. Tensors of a tuple are `scores_0` and so on. Tensors of a dict, named tuple,
    dataclass or KeyedTensor keep its names. A JaggedTensor is its values. A nested name joins both names with a dot.
    A name that the protocol uses for lookups gets a prefix, such as `scores.values`. Values of other types are left
    out.

    Args:
        model: the model, for messages.
        answer: the answer of the model or of its graph.
        kind: the type of its tensors: Tensor, or the nodes of a graph.
        advice: for the message if the answer has no tensor.

    Raises:
        ModelError: the answer has no tensor, or two tensors have one name.
    """
    pairs = [(served_name(name), output) for name, output in _leaves("", answer, kind)]
    outputs = dict(pairs)
    if duplicates := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ModelError(f"{type(model).__name__}: two of its answers have the name {duplicates[0]!r}: rename one")
    tensors = {name: output for name, output in outputs.items() if output is not None}
    if not tensors:
        keyed = ", ".join(f"{name!r}, a KeyedJaggedTensor" for name in outputs)
        raise not_tensors(model, keyed or type(answer).__name__, advice)
    return tensors, [name for name, output in outputs.items() if output is None]


def not_tensors(model: nn.Module, got: str, advice: str) -> ModelError:
    """The error for an answer without tensors."""
    return ModelError(
        f"{type(model).__name__}: expected a tensor, or tensors as a tuple or by name, as its answer, got {got}"
        f"{advice and f': {advice}'}"
    )


def served_name(name: str) -> str:
    """The name of an output in responses. Names that lookups use, such as `values`, get a prefix."""
    return f"{_SCORES}.{name}" if name in RESERVED else name


def renamed_outputs(outputs: Iterable[str]) -> Iterator[str]:
    """A line for each output whose served name differs from the model's."""
    for name in RESERVED:
        if served_name(name) in outputs:
            yield f"the output {name} is called {served_name(name)}: {name} is a tensor of lookups"


def _leaves(path: str, value: Any, kind: type[Output]) -> Iterator[tuple[str, Output | None]]:
    """The tensors of a value, with their names. None stands for a KeyedJaggedTensor."""
    if isinstance(value, kind):
        yield path or _SCORES, value
    elif isinstance(value, JaggedTensor):
        yield from _leaves(path, value.values(), kind)
    elif isinstance(value, KeyedJaggedTensor):
        yield path or _SCORES, None
    elif isinstance(value, Mapping | KeyedTensor):
        by_name = value.to_dict() if isinstance(value, KeyedTensor) else value
        for name, part in by_name.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), part, kind)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from _leaves(path, dict(zip(value._fields, value, strict=True)), kind)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _leaves(path, {field.name: getattr(value, field.name) for field in fields(value)}, kind)
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _leaves(f"{path or _SCORES}_{number}", part, kind)
