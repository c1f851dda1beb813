"""A node of a graph whose arguments are values, and the rules for operators that take values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from export.user_side.builder import Builder
from export.user_side.values import Shape, Value, is_value


@dataclass(frozen=True, slots=True)
class Call:
    """A node whose arguments are values.

    Attributes:
        build: the graph that is built.
        node: of the graph of torch.export.
        shape: of what it returns; () for several tensors.
        entries: what earlier nodes are.
    """

    build: Builder
    node: fx.Node
    shape: Shape
    entries: Mapping[fx.Node, Any]

    def argument(self, number: int, default: Any = None) -> Any:
        """An argument: a value in place of a tensor."""
        argument = self.node.args[number] if number < len(self.node.args) else default
        return self.entries[argument] if isinstance(argument, fx.Node) else argument

    def value(self, number: int) -> Value | None:
        """An argument that is a value, or None."""
        argument = self.argument(number)
        return argument if is_value(argument) else None

    def dim(self, number: int, rank: int, default: int = 0) -> int:
        """An argument that is a dimension."""
        return int(self.argument(number, default)) % rank


# What a node is, or None if the call is one that the rule does not know.
Rule = Callable[[Call], Any]
