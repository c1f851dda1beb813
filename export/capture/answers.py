"""What a model answers, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from export.errors import ModelError

# The name of a model's only output; several without names are numbered.
_SCORES = "scores"


def outputs_of(model: nn.Module, answer: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of an answer, by name; and the names of jagged tensors in it, which have no row for each sample.

    A tensor alone is `scores`, those of a tuple are `scores_0` and so on, those of a dict, a named tuple, a dataclass
    or a KeyedTensor have its names. What is in another has both names, with a dot between. All else is left out.

    Raises:
        ModelError: there is no tensor.
    """
    every = dict(_named("", answer))
    found = {name: each for name, each in every.items() if each is not None}
    if not found:
        raise ModelError(
            f"{type(model).__name__}: expected a tensor, or tensors as a tuple or by name, as its answer, got "
            f"{', '.join(f'{name!r}, which is jagged: have it padded' for name in every) or type(answer).__name__}"
        )
    return found, [name for name, each in every.items() if each is None]


def _named(path: str, value: Any) -> Iterator[tuple[str, Tensor | None]]:
    if isinstance(value, Tensor):
        yield path or _SCORES, value
    elif isinstance(value, JaggedTensor | KeyedJaggedTensor):
        yield path or _SCORES, None
    elif isinstance(value, Mapping | KeyedTensor):
        named = value.to_dict() if isinstance(value, KeyedTensor) else value
        for name, each in named.items():
            yield from _named(f"{path}.{name}" if path else str(name), each)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from _named(path, dict(zip(value._fields, value, strict=True)))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _named(path, {each.name: getattr(value, each.name) for each in fields(value)})
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _named(f"{path or _SCORES}_{number}", each)
