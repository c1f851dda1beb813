"""What named models are made of: their tables, and random ids and numbers for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.support.models import Spec, table_of

# The arguments of one call: positional ones, or by name.
Example = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class NamedModel:
    """A model, and what is expected of it.

    Attributes:
        make: makes the module.
        example: makes the arguments of one call, from random numbers, for a number of samples.
        refused: a pattern of the message of its refusal, with the line to change if one is to be changed; None if it is
            served, and answers what the module answers.
    """

    make: Callable[[], nn.Module]
    example: Callable[[np.random.Generator, int], Example]
    refused: str | None = None


POOLED = (
    Spec("user", 50, 8, "SUM", ("user_id",)),
    Spec("item", 60, 8, "SUM", ("item_id",)),
    Spec("word", 40, 8, "MEAN", ("words",)),
)
# One table is read by two features, the others by one.
ROWS = (Spec("film", 60, 8, "NONE", ("seen", "target")), Spec("shop", 30, 8, "NONE", ("visited",)))
ROWS_OF = {name: spec.rows for name, spec in table_of((*POOLED, *ROWS)).items()}
WIDTH = 5
DIM = 8


def ids(
    random: np.random.Generator, samples: int, *keys: str, least: int = 0, most: int = 4, **lengths: Tensor
) -> KeyedJaggedTensor:
    """Random ids of some features, `least` to `most` for each sample.

    Args:
        random: where they come from.
        samples: how many.
        keys: the features.
        least: the fewest ids of a sample.
        most: the most ids of a sample.
        lengths: of features whose lengths are given.
    """
    columns = [
        lengths[key]
        if key in lengths
        else torch.from_numpy(random.integers(least, most + 1, samples, dtype=np.int32))
        for key in keys
    ]
    values = [of(random, ROWS_OF[key], int(column.sum())) for key, column in zip(keys, columns, strict=True)]
    return KeyedJaggedTensor(list(keys), torch.cat(values), lengths=torch.cat(columns))


def pooled_ids(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    return ids(random, samples, "user_id", "item_id", "words")


def of(random: np.random.Generator, rows: int, *shape: int) -> Tensor:
    """Random int64 in [0, rows)."""
    return torch.from_numpy(random.integers(0, rows, shape))


def numbers(random: np.random.Generator, *shape: int) -> Tensor:
    """Random float32 of a normal distribution."""
    return torch.from_numpy(random.standard_normal(shape, np.float32))


def named(**makers: Callable[[np.random.Generator, int], Any]) -> Callable[[np.random.Generator, int], Example]:
    """An example of arguments by name."""

    def example(random: np.random.Generator, samples: int) -> dict[str, Any]:
        return {name: make(random, samples) for name, make in makers.items()}

    return example


def positional(*makers: Callable[[np.random.Generator, int], Any]) -> Callable[[np.random.Generator, int], Example]:
    """An example of positional arguments."""

    def example(random: np.random.Generator, samples: int) -> tuple[Any, ...]:
        return tuple(make(random, samples) for make in makers)

    return example


def dense(random: np.random.Generator, samples: int) -> Tensor:
    return numbers(random, samples, WIDTH)


def nothing(_random: np.random.Generator, _samples: int) -> None:
    """None, as an argument that is left empty."""


def by_name(
    makers: Mapping[str, Callable[[np.random.Generator, int], Any]],
) -> Callable[[np.random.Generator, int], Any]:
    """One argument that is a dict."""
    return lambda random, samples: {name: make(random, samples) for name, make in makers.items()}
