"""Where the samples of a tensor are, in a graph of core ATen whose number of samples is a symbol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the samples of a tensor are. The index j of dimension `dim` belongs to sample (j // block) % B.

    With a key, each index belongs to an id of that key instead, the ids of a sample being side by side.
    """

    dim: int
    block: int = 1
    key: str | None = None


class Call:
    """One use of an operator.

    Args:
        node: a step of a graph of ATen.
        rows: where the samples of earlier steps are. Steps that are the same for all samples are not in it.
        samples: the symbol of B.

    Attributes:
        given: its arguments by name.
        out: what it answers with: a tensor without numbers, or several.
    """

    def __init__(self, node: fx.Node, rows: Mapping[fx.Node, Rows], samples: Any) -> None:
        schema = cast(torch._ops.OpOverload, node.target)._schema.arguments
        names, defaults = [each.name for each in schema], {each.name: each.default_value for each in schema}
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        self.out: Any = node.meta["val"]
        self._rows, self._samples = rows, samples

    def rows(self, name: str) -> Rows | None:
        """Where the samples of an argument are; None: it is the same for all samples."""
        (found,) = self.each_rows(name) or [None]
        return found

    def each_rows(self, name: str) -> list[Rows | None]:
        """Where the samples of each tensor of an argument are."""
        given = self.given.get(name)
        return [
            self._rows.get(each)
            for each in (given if isinstance(given, list | tuple) else [given])
            if isinstance(each, fx.Node)
        ]

    def is_numbered(self, name: str) -> bool:
        """Whether the first tensor of an argument says which sample each of its rows is of."""
        first = self.given[name][0]
        return isinstance(first, fx.Node) and is_numbering(first, self._samples)

    def is_constant(self, *names: str) -> bool:
        """Whether some arguments are the same for all samples."""
        return not any(any(self.each_rows(name)) for name in names)

    def shape(self, name: str) -> Sequence[Any]:
        """The shape of an argument."""
        found: Sequence[Any] = self.given[name].meta["val"].shape
        return found

    def dims(self, name: str = "dim", of: str = "self") -> list[int]:
        """An argument that names dimensions of another, counted from the first."""
        given = self.given.get(name)
        named = [given] if isinstance(given, int) else list(given or ())
        return [dim % max(1, len(self.shape(of))) for dim in named]


def is_numbering(node: fx.Node, samples: Any) -> bool:
    """Whether a step is the numbers 0 to B − 1: which sample a row is of."""
    if str(node.target) != "aten.arange.start_step":
        return False
    start, end, *step = node.args
    size = end.meta.get("val") if isinstance(end, fx.Node) else None
    return bool(start == 0 and step in ([], [1]) and isinstance(size, torch.SymInt) and size.node.expr == samples)


def is_number(node: fx.Node) -> bool:
    """Whether a step answers with a number, which is then made of the number of samples."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def per_sample(size: Any, samples: Any) -> int | None:
    """k where a size is k·B; None where it is another."""
    if not isinstance(size, torch.SymInt):
        return None
    ratio = size.node.expr / samples
    return int(ratio) if ratio.is_Integer else None


def fits(rows: Rows, shape: Sequence[Any], samples: Any) -> bool:
    """Whether a tensor may have its samples there: the size of no other dimension depends on their number."""
    if not (0 <= rows.dim < len(shape) and rows.block):
        return False
    count = per_sample(shape[rows.dim], samples)
    others = [size for dim, size in enumerate(shape) if dim != rows.dim]
    return bool(count) and not (count or 0) % rows.block and all(isinstance(size, int) for size in others)
