"""The numbers of rows of a graph's inputs and outputs, as symbols of torch.export.

A tensor has a row for each sample, or for each id of a key. Two keys with one symbol have equally many ids in total.
If they also have equally many ids in each sample of the example, requests must have so too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from export.capture.bags import have_same_lengths
from export.capture.call_signature import Signature
from export.capture.graph_nodes import origin_of
from serving.bundle.scores import JaggedInput, JaggedKind

# An input of a graph: the embeddings of all pooled features; a tensor of the example, by its path; or made of ids.
Input = str | JaggedInput


def dims_of_keys(keys: Iterable[str | None], counts: Mapping[str, int]) -> tuple[dict[int, Any], ...]:
    """The dynamic first dimension of each input of a graph, for torch.export.

    Args:
        keys: the key for whose ids each input has rows; None if it has a row for each sample.
        counts: the keys with one number of ids in every sample, whose inputs have that multiple of the samples.
    """
    samples: Any = torch.export.Dim("samples", min=2)
    sizes = {key: count * samples for key, count in counts.items()}
    return tuple({0: samples if key is None else sizes.get(key, torch.export.Dim.AUTO)} for key in keys)


class RowCounts:
    """The number of ids of each key, as a graph has it.

    Args:
        graph: of a model.
        inputs: of the graph. The first has a row for each sample.
        signature: of the model.
        key_of_feature: the key of each feature.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Input], signature: Signature, key_of_feature: Mapping[str, str]
    ) -> None:
        nodes = (node for node in graph.nodes if node.op == "placeholder")
        self._graph, self._signature = graph, signature
        self._inputs = dict(zip(nodes, inputs, strict=True))
        self._samples = next(iter(self._inputs)).meta["val"].shape[0].node.expr
        self._keys_by_size: dict[Any, list[str]] = {}
        self._size_of_numbers: dict[str, Any] = {}
        for node, name in self._inputs.items():
            if isinstance(name, JaggedInput) and not is_lengths(name):
                size = node.meta["val"].shape[0].node.expr
                if name.kind is JaggedKind.NUMBERS:
                    self._size_of_numbers[name.name] = size
                else:
                    self._keys_by_size.setdefault(size, []).append(signature.key_of(name, key_of_feature))

    def fixed(self) -> dict[str, int]:
        """The keys that must have one number of ids in every sample, with that number.

        The forward makes such a key itself, or fails for any other number.
        """
        fixed = dict(self._signature.fixed)
        for size, keys in self._all_keys_by_size().items():
            if (size / self._samples).is_Integer:
                fixed |= dict.fromkeys(keys, int(size / self._samples))
        for group in self._groups():
            if counts := [fixed[key] for key in group if key in fixed]:
                fixed |= dict.fromkeys(group, counts[0])
        return fixed

    def first(self) -> dict[str, str]:
        """The keys that must have equally many ids in each sample as another key, with that key."""
        first: dict[str, str] = {}
        for leader, *followers in self._groups():
            for follower in followers:
                new, old = first.get(leader, leader), first.get(follower, follower)
                first |= {key: new for key in (follower, *first) if first.get(key, key) == old}
        fixed = self.fixed()
        return {key: leader for key, leader in first.items() if key != leader and key not in fixed}

    def _all_keys_by_size(self) -> dict[Any, list[str]]:
        """The keys with each number of ids, including the keys of numbers."""
        keys_by_size = {size: [*keys] for size, keys in self._keys_by_size.items()}
        for name, size in self._size_of_numbers.items():
            keys_by_size.setdefault(size, []).append(self._signature.numbers[name])
        return keys_by_size

    def _groups(self) -> Iterator[list[str]]:
        """Groups of keys that must have equally many ids in each sample.

        The forward fails for any other request, or finds rows of one key by the lengths of another.
        """
        keys_by_size, bags = self._all_keys_by_size(), self._signature.bags()
        groups = [*keys_by_size.values()]
        for size, sources in _rows_and_lengths(self._graph):
            names = (self._inputs[node] for node in sources)
            keys_of_lengths = [name.name for name in names if isinstance(name, JaggedInput) and is_lengths(name)]
            if size in keys_by_size and len(keys_of_lengths) == 1:
                groups.append([*keys_by_size[size], *keys_of_lengths])
        for leader, *members in groups:
            candidates = (key for key in dict.fromkeys(members) if key != leader and {leader, key} <= bags.keys())
            yield [leader, *(key for key in candidates if have_same_lengths(bags[leader], bags[key]))]


def symbolic_dims(node: fx.Node) -> list[tuple[Any, int]]:
    """The sizes of a tensor that are no fixed numbers, as expressions, with their dimensions."""
    sizes = [(size.node.expr, dim) for dim, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)]
    return [(size, dim) for size, dim in sizes if not size.is_number]


def shape_of(node: fx.Node, samples: Any) -> str:
    """The shape of a tensor, for messages. B is the number of samples, n is any other size that is not fixed."""
    sizes = [str(size) for size in node.meta["val"].shape]
    for size, dim in symbolic_dims(node):
        sizes[dim] = "B" if size == samples else "n"
    return f"[{', '.join(sizes)}]"


def _rows_and_lengths(graph: fx.Graph) -> Iterator[tuple[Any, set[fx.Node]]]:
    """The number of rows that each of FBGEMM's jagged operators gets, and the inputs from which its offsets are
    computed.

    The operators do not check that rows and offsets match.
    """
    for node in graph.nodes:
        if str(node.target).startswith("fbgemm.jagged_"):
            values, *arguments = node.all_input_nodes
            offsets = [
                argument
                for argument in arguments
                if getattr(argument.meta["val"], "dtype", None) in (torch.int32, torch.int64)
            ]
            yield from ((size, _inputs_of(offsets)) for size, dim in symbolic_dims(values) if dim == 0)


def _inputs_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The inputs of a graph from which some nodes are computed."""
    visited, waiting = set[fx.Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            waiting += node.all_input_nodes
    return {node for node in visited if node.op == "placeholder"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A tensor that a model answers. What is served has its rows in the first dimension.

    Attributes:
        key: the key for whose ids it has rows; None if it has a row for each sample.
        dim: the dimension of its rows.
    """

    key: str | None
    dim: int


def rows_of_answers(inputs: Mapping[fx.Node, Input], answers: Mapping[str, fx.Node]) -> dict[str, tuple[Any, int]]:
    """The number and the dimension of the rows of answers, if they have one for each sample, or each id of a key.

    Args:
        inputs: of a graph.
        answers: by name. An answer that is an input of the graph is left out.
    """
    sizes = {size for node, name in inputs.items() if not is_lengths(name) for size, _ in symbolic_dims(node)}
    dims = {name: symbolic_dims(answer) for name, answer in answers.items() if origin_of(answer) not in inputs}
    return {name: pairs[0] for name, pairs in dims.items() if len(pairs) == 1 and pairs[0][0] in sizes}


def served_answers(
    rows: Mapping[str, tuple[Any, int]],
    inputs: Mapping[fx.Node, Input],
    used: Collection[Input],
    key_of: Callable[[JaggedInput], str],
) -> dict[str, Answer]:
    """What the rows of answers are.

    Args:
        rows: as `rows_of_answers` returns them.
        inputs: of the graph. The first has a row for each sample.
        used: the inputs that the program uses. Of several keys with equally many ids, its first one is named.
        key_of: the key whose ids an input is made of.
    """
    keys: dict[Any, str | None] = {
        size: key_of(name)
        for node, name in reversed([*inputs.items()])
        if isinstance(name, JaggedInput) and name in used and not is_lengths(name)
        for size, _ in symbolic_dims(node)
    }
    keys |= {size: None for size, _ in symbolic_dims(next(iter(inputs)))}
    return {name: Answer(keys[size], dim) for name, (size, dim) in rows.items()}


def is_lengths(name: Input) -> bool:
    """Whether an input is the number of ids of a key in each sample."""
    return isinstance(name, JaggedInput) and name.kind is JaggedKind.LENGTHS
