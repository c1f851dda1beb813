"""The values of a graph for one user and many items, before the tensors that they are made of are put together.

A value has a row for each item. Its tensors need not have that many: a tensor broadcasts to its value, as one row of
the user does, or an item beside each event of a history. How a value is made of tensors is kept, so that a layer can
be applied to each of them alone.
"""

import math
from dataclasses import dataclass
from typing import TypeGuard

from torch import fx

# Stands for the number of items in a shape: no layer has this width.
ITEMS = 1_000_003

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A tensor that broadcasts to a value.

    Attributes:
        node: computes the tensor.
        size: of the tensor. A dimension is as in `shape`, or 1.
        shape: of the value. `ITEMS` is the number of items.
        per_user: whether the tensor is the same for all items.
    """

    node: fx.Node
    size: Shape
    shape: Shape
    per_user: bool

    @property
    def numel(self) -> int:
        """The numbers of the tensor, for `ITEMS` items."""
        return math.prod(self.size)


@dataclass(frozen=True, eq=False, slots=True)
class Joined:
    """Values side by side along a dimension, which is not that of the items."""

    parts: tuple["Value", ...]
    dim: int
    shape: Shape
    per_user: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """Values that are added, each with a sign: 1 or -1."""

    terms: tuple[tuple[int, "Term"], ...]
    shape: Shape
    per_user: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A tensor times a value. One of both is per user, if any is."""

    factor: Part
    other: "Part | Widened | Sum"
    shape: Shape
    per_user: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Widened:
    """A linear layer that makes more columns than it takes: `source @ weight.T`.

    Attributes:
        source: of items, [..., K].
        weight: [H, K]; the same for all items.
    """

    source: Part
    weight: Part
    shape: Shape
    per_user: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Reordered:
    """Indices of a value along a dimension, which is not that of the items, in any order.

    Attributes:
        source: the value.
        dim: the dimension.
        order: an index of `source` for each index; indices may be left out, and may be repeated.
    """

    source: "Value"
    dim: int
    order: tuple[int, ...]
    shape: Shape
    per_user: bool = False


Term = Part | Product | Widened
Value = Part | Joined | Sum | Product | Widened | Reordered


@dataclass(frozen=True, eq=False, slots=True)
class Whole:
    """What is never taken apart: a tensor whose rows are not items, a number, or several tensors.

    Attributes:
        node: computes it.
        per_user: whether it is what one sample with the user's inputs has. If items need it, it is computed again,
            from a row for each item.
    """

    node: fx.Node
    per_user: bool


def is_value(entry: object) -> TypeGuard[Value]:
    """Whether it is a value."""
    return isinstance(entry, Part | Joined | Sum | Product | Widened | Reordered)


def changed(size: Shape, dim: int, width: int) -> Shape:
    """A shape with another width of one dimension."""
    return (*size[:dim], width, *size[dim + 1 :])
