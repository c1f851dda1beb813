"""The dimension of a tensor that holds its samples, in a graph of core ATen whose number of samples B is a symbol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class SampleAxis:
    """The dimension that holds the samples. Its index j belongs to sample (j // block) % B.

    With a key, each index belongs to an id of that key instead. The ids of a sample are adjacent.
    """

    dim: int
    block: int = 1
    key: str | None = None


class OperatorCall:
    """One call of an operator.

    Args:
        node: of a graph of ATen.
        axes: the sample axes of earlier nodes. Nodes that are the same for all samples are not in it.
        samples: the symbol of B.

    Attributes:
        arguments: by name.
        output: what the operator returns: one fake tensor or several.
    """

    def __init__(self, node: fx.Node, axes: Mapping[fx.Node, SampleAxis], samples: Any) -> None:
        schema = cast(torch._ops.OpOverload, node.target)._schema.arguments
        names = [argument.name for argument in schema]
        defaults = {argument.name: argument.default_value for argument in schema}
        self.arguments: dict[str, Any] = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        self.output: Any = node.meta["val"]
        self._axes = axes
        self._samples = samples

    def axis(self, name: str) -> SampleAxis | None:
        """The sample axis of an argument, or None if it is the same for all samples."""
        (axis,) = self.axes(name) or [None]
        return axis

    def axes(self, name: str) -> list[SampleAxis | None]:
        """The sample axis of each tensor of an argument."""
        argument = self.arguments.get(name)
        tensors = argument if isinstance(argument, list | tuple) else [argument]
        return [self._axes.get(tensor) for tensor in tensors if isinstance(tensor, fx.Node)]

    def is_indexed_by_sample(self, name: str) -> bool:
        """Whether the first tensor of an argument is arange(B)."""
        tensor = self.arguments[name][0]
        return isinstance(tensor, fx.Node) and is_sample_range(tensor, self._samples)

    def is_constant(self, *names: str) -> bool:
        """Whether some arguments are the same for all samples."""
        return not any(any(self.axes(name)) for name in names)

    def shape(self, name: str) -> Sequence[Any]:
        """The shape of an argument."""
        shape: Sequence[Any] = self.arguments[name].meta["val"].shape
        return shape

    def dims(self, name: str = "dim", of: str = "self") -> list[int]:
        """An argument that names dimensions of another one, counted from the first."""
        argument = self.arguments.get(name)
        dims = [argument] if isinstance(argument, int) else list(argument or ())
        return [dim % max(1, len(self.shape(of))) for dim in dims]


def is_sample_range(node: fx.Node, samples: Any) -> bool:
    """Whether a node is arange(B): the number of the sample of each row."""
    if str(node.target) != "aten.arange.start_step":
        return False
    start, end, *step = node.args
    size = end.meta.get("val") if isinstance(end, fx.Node) else None
    return bool(start == 0 and step in ([], [1]) and isinstance(size, torch.SymInt) and size.node.expr == samples)


def is_symbolic_number(node: fx.Node) -> bool:
    """Whether a node returns a number, which is then computed from the number of samples."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def rows_per_sample(size: Any, samples: Any) -> int | None:
    """k if a size is k·B, else None."""
    if not isinstance(size, torch.SymInt):
        return None
    ratio = size.node.expr / samples
    return int(ratio) if ratio.is_Integer else None


def can_hold_samples(axis: SampleAxis, shape: Sequence[Any], samples: Any) -> bool:
    """Whether a tensor of this shape can have this sample axis: no other size may depend on the number of samples."""
    if not (0 <= axis.dim < len(shape) and axis.block):
        return False
    count = rows_per_sample(shape[axis.dim], samples)
    other_sizes = [size for dim, size in enumerate(shape) if dim != axis.dim]
    return bool(count) and not (count or 0) % axis.block and all(isinstance(size, int) for size in other_sizes)
