"""What a model answers, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from export.errors import ModelError

# The name of a model's only output; several without names are numbered.
_SCORES = "scores"


def outputs_of(model: nn.Module, answer: Any) -> dict[str, Tensor]:
    """The tensors of an answer, by name.

    One alone is `scores`, those of a tuple are `scores_0` and so on, those of a dict, a named tuple, a dataclass or a
    KeyedTensor have its names. What is in another has both names, with a dot between. What is no tensor is left out.

    Raises:
        ModelError: there is none; or there is a JaggedTensor, which has no row for each sample.
    """
    found = dict(_named(model, "", answer))
    if not found:
        raise ModelError(
            f"{type(model).__name__}: expected a tensor, or tensors as a tuple or by name, as its answer, got "
            f"{type(answer).__name__}"
        )
    return found


def _named(model: nn.Module, path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or _SCORES, value
    elif isinstance(value, JaggedTensor | KeyedJaggedTensor):
        raise ModelError(
            f"{type(model).__name__}: output {path or _SCORES!r}: expected a tensor with a row for each sample, got "
            f"a {type(value).__name__}: have the forward pad it (to_padded_dense)"
        )
    elif isinstance(value, Mapping | KeyedTensor):
        named = value.to_dict() if isinstance(value, KeyedTensor) else value
        for name, each in named.items():
            yield from _named(model, f"{path}.{name}" if path else str(name), each)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from _named(model, path, dict(zip(value._fields, value, strict=True)))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _named(model, path, {each.name: getattr(value, each.name) for each in fields(value)})
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _named(model, f"{path or _SCORES}_{number}", each)
