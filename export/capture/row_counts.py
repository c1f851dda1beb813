"""How many rows there are of what a graph takes, answers and looks through: symbols that torch.export gave them.

A tensor has a row for each sample, or for each id of a key. Two keys of one symbol have as many ids in all, and where
the example has so, too, in each sample.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from export.capture.bags import have_as_many
from export.capture.call_signature import Signature
from export.capture.graph_nodes import origin_of
from serving.bundle.scores import JaggedInput, JaggedKind

# Of a graph: the embeddings of all pooled features; a tensor of the example, by its path; or what is made of ids.
Input = str | JaggedInput


class Sizes:
    """How many ids there are of each key, as a graph has it.

    Args:
        graph: of a model.
        inputs: what it takes. The first has a row for each sample.
        signature: what the arguments of the model are made of.
        features: the key of each feature.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Input], signature: Signature, features: Mapping[str, str]
    ) -> None:
        nodes = (node for node in graph.nodes if node.op == "placeholder")
        self._graph, self._signature = graph, signature
        self._inputs = dict(zip(nodes, inputs, strict=True))
        self._samples = next(iter(self._inputs)).meta["val"].shape[0].node.expr
        # The keys of so many ids; and how many rows numbers of ids have, by name.
        self._keys: dict[Any, list[str]] = {}
        self._numbers: dict[str, Any] = {}
        for node, each in self._inputs.items():
            if isinstance(each, JaggedInput) and not is_lengths(each):
                size = node.meta["val"].shape[0].node.expr
                if each.kind is JaggedKind.NUMBERS:
                    self._numbers[each.name] = size
                else:
                    self._keys.setdefault(size, []).append(signature.key_of(each, features))

    def fixed(self) -> dict[str, int]:
        """The keys with as many ids in each sample: the forward makes them so, or can be called with no others."""
        found = dict(self._signature.fixed)
        for size, keys in self._all().items():
            if (size / self._samples).is_Integer:
                found |= dict.fromkeys(keys, int(size / self._samples))
        for group in self._groups():
            if counts := [found[key] for key in group if key in found]:
                found |= dict.fromkeys(group, counts[0])
        return found

    def first(self) -> dict[str, str]:
        """The keys that have as many ids in each sample as another one, and that one."""
        found: dict[str, str] = {}
        for one, *others in self._groups():
            for other in others:
                of_one, of_other = found.get(one, one), found.get(other, other)
                found |= {key: of_one for key in (other, *found) if found.get(key, key) == of_other}
        fixed = self.fixed()
        return {key: of for key, of in found.items() if key != of and key not in fixed}

    def _all(self) -> dict[Any, list[str]]:
        """The keys of so many ids, those of numbers among them."""
        found = {size: [*keys] for size, keys in self._keys.items()}
        for name, size in self._numbers.items():
            found.setdefault(size, []).append(self._signature.numbers[name])
        return found

    def _groups(self) -> Iterator[list[str]]:
        """Keys that have as many ids in each sample: the forward can be called with no others, or finds rows of one
        by the lengths of another.
        """
        keys, bags = self._all(), self._signature.bags()
        groups = [*keys.values()]
        for size, made_of in _rows_and_lengths(self._graph):
            given = (self._inputs[node] for node in made_of)
            of = [each.name for each in given if isinstance(each, JaggedInput) and is_lengths(each)]
            if size in keys and len(of) == 1:
                groups.append([*keys[size], *of])
        for one, *others in groups:
            alike = (key for key in dict.fromkeys(others) if key != one and {one, key} <= bags.keys())
            yield [one, *(key for key in alike if have_as_many(bags[one], bags[key]))]


def open_dims(node: fx.Node) -> list[tuple[Any, int]]:
    """The sizes of a tensor that are no fixed numbers, as expressions, and their dimensions."""
    sizes = [(size.node.expr, dim) for dim, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)]
    return [(size, dim) for size, dim in sizes if not size.is_number]


def shape_of(node: fx.Node, samples: Any) -> str:
    """The shape of a tensor, for messages. B is the number of samples, n any other that is not fixed."""
    sizes = [str(size) for size in node.meta["val"].shape]
    for size, dim in open_dims(node):
        sizes[dim] = "B" if size == samples else "n"
    return f"[{', '.join(sizes)}]"


def _rows_and_lengths(graph: fx.Graph) -> Iterator[tuple[Any, set[fx.Node]]]:
    """How many rows each of FBGEMM's jagged operators gets, as an expression; and the inputs of the graph that the
    offsets are made of by which it finds them. It does not look whether they fit.
    """
    for node in graph.nodes:
        if str(node.target).startswith("fbgemm.jagged_"):
            values, *others = node.all_input_nodes
            offsets = [
                each for each in others if getattr(each.meta["val"], "dtype", None) in (torch.int32, torch.int64)
            ]
            yield from ((size, _made_of(offsets)) for size, dim in open_dims(values) if dim == 0)


def _made_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The inputs of a graph that some steps are made of."""
    seen, waiting = set[fx.Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return {node for node in seen if node.op == "placeholder"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A tensor that a model answers. What is served has its rows first.

    Attributes:
        key: it has a row for each id of this key. None: it has one for each sample.
        dim: the dimension of its rows.
    """

    key: str | None
    dim: int


def rows_of_answers(inputs: Mapping[fx.Node, Input], answers: Mapping[str, fx.Node]) -> dict[str, tuple[Any, int]]:
    """How many rows answers have, and their dimension: of those that have one for each sample, or each id of a key.

    Args:
        inputs: of a graph.
        answers: by name. One that only hands an input on is left out.
    """
    sizes = {size for node, each in inputs.items() if not is_lengths(each) for size, _ in open_dims(node)}
    found = {name: open_dims(each) for name, each in answers.items() if origin_of(each) not in inputs}
    return {name: each[0] for name, each in found.items() if len(each) == 1 and each[0][0] in sizes}


def served(
    rows: Mapping[str, tuple[Any, int]],
    inputs: Mapping[fx.Node, Input],
    taken: Collection[Input],
    key_of: Callable[[JaggedInput], str],
) -> dict[str, Answer]:
    """What the rows of answers are.

    Args:
        rows: as `rows_of_answers` gives them.
        inputs: of the graph. The first has a row for each sample.
        taken: what the program takes of them. Of several keys with as many ids, the first of those it takes.
        key_of: the key whose ids an input is made of.
    """
    keys: dict[Any, str | None] = {
        size: key_of(each)
        for node, each in reversed([*inputs.items()])
        if isinstance(each, JaggedInput) and each in taken and not is_lengths(each)
        for size, _ in open_dims(node)
    }
    keys |= {size: None for size, _ in open_dims(next(iter(inputs)))}
    return {name: Answer(keys[size], dim) for name, (size, dim) in rows.items()}


def is_lengths(given: Input) -> bool:
    """Whether an input says how many ids of a key each sample has."""
    return isinstance(given, JaggedInput) and given.kind is JaggedKind.LENGTHS
