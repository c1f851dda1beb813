"""Cross layers: columns of items times the columns that a layer makes. One product does for a whole layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from export.user_side.builder import Builder
from export.user_side.values import Part, Product, Shape, Sum, Widened

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Crossed:
    """Columns of items times a layer, `factor * (sources @ weight.T + bias)`.

    Attributes:
        product: what it computes.
        sources: what the layer takes, side by side.
        weight: [H, K].
        bias: [H].
    """

    product: Product
    sources: tuple[Part, ...]
    weight: Part
    bias: Part

    @property
    def layer(self) -> tuple[Any, ...]:
        """The same for products that `multiplied_together` may compute."""
        return tuple(source.node for source in self.sources)


def crossed_of(build: Builder, product: Product) -> Crossed | None:
    """A product as columns of items times a layer, or None if it is something else."""
    other, shape = product.other, product.shape
    terms = other.terms if isinstance(other, Sum) else ((1, other),)
    layers = [(sign, term) for sign, term in terms if isinstance(term, Widened)]
    rows = [(sign, term) for sign, term in terms if isinstance(term, Part) and _is_row(term, shape)]
    if not layers or len(layers) + len(rows) < len(terms) or product.factor.size != shape:
        return None
    if any(term.source.size[:-1] != shape[:-1] for _, term in layers):
        return None
    weight = build.side_by_side([build.signed(term.weight, sign) for sign, term in layers])
    width = shape[-1]
    zeros = Part(build.call(_ATEN.new_zeros, weight.node, [width]), (width,), (width,), weight.per_user)
    of_width = [(sign, build.expanded(build.reshaped(row, row.size[-1:]), (width,))) for sign, row in rows]
    bias = build.total([(1, zeros), *of_width], (width,))
    assert bias is not None  # noqa: S101  zeros are a term
    return Crossed(product, tuple(term.source for _, term in layers), weight, bias)


def multiplied_together(build: Builder, crossed: Sequence[Crossed]) -> Part:
    """The columns of products with one layer, side by side. The same products get the same part again."""
    key = tuple(id(one.product) for one in crossed)
    if key not in build.crossed:
        weight, bias = (
            build.joined(parts, 0, (sum(part.size[0] for part in parts), *parts[0].size[1:]))
            for parts in ([one.weight for one in crossed], [one.bias for one in crossed])
        )
        layer = build.linear(build.side_by_side(crossed[0].sources), weight, bias)
        factor = build.side_by_side([one.product.factor for one in crossed])
        # The products are kept, because their ids are the key.
        build.crossed[key] = [one.product for one in crossed], build.multiplied(layer, factor)
    return build.crossed[key][1]


def _is_row(part: Part, shape: Shape) -> bool:
    """Whether a tensor is one row for all items, of as many columns as a value has, or of one."""
    return part.per_user and part.numel == part.size[-1] and part.size[-1] in (1, shape[-1])
