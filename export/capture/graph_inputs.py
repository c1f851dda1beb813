"""The inputs of a dense part: their names in a graph, and their values for some samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from export.capture.bags import Bags
from serving.bundle.scores import JaggedInput, JaggedKind


def ids_of(key: str) -> JaggedInput:
    """The ids of a key, integers [n]."""
    return JaggedInput(JaggedKind.IDS, key)


def lengths_of(key: str) -> JaggedInput:
    """The number of ids of a key in each sample, integers [B]."""
    return JaggedInput(JaggedKind.LENGTHS, key)


def weights_of(key: str) -> JaggedInput:
    """The weights of the ids of a key, floats [n]."""
    return JaggedInput(JaggedKind.WEIGHTS, key)


def rows_of(feature: str) -> JaggedInput:
    """The rows of a feature that is not pooled, floats [n, dim]."""
    return JaggedInput(JaggedKind.ROWS, feature)


def numbers_of(name: str) -> JaggedInput:
    """A dense input with a row for each id of a key, [n, *shape]."""
    return JaggedInput(JaggedKind.NUMBERS, name)


@dataclass(frozen=True, eq=False, slots=True)
class DenseInputs:
    """The inputs of a dense part, for some samples.

    Attributes:
        embeddings: of all pooled features side by side, floats [B, D].
        dense: the dense inputs with a row for each sample, [B, *shape] each.
        bags: the ids of the request, by key; and the dense inputs with a row for each id of a key, by name.
        rows: of each feature that is not pooled, floats [n, dim].
        keys: the key of each of these features, and of each dense input with a row for each id.
        fixed: the keys with one number of ids in every sample, and that number.
        first: for a key that must have as many ids in each sample as another key, that key.
    """

    embeddings: Tensor
    dense: tuple[Tensor, ...]
    bags: Bags = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """B."""
        return len(self.embeddings)

    def key_of(self, name: str) -> str:
        """The key of a feature or dense input, or the first of the keys that have equally many ids in each sample."""
        key = self.keys.get(name, name)
        return self.first.get(key, key)

    @property
    def numbers(self) -> list[str]:
        """The names of the dense inputs with a row for each id of a key."""
        return [name for name in self.bags if name in self.keys and name not in self.rows]

    def tensors(self, jagged: Sequence[JaggedInput]) -> list[Tensor]:
        """The arguments of a dense part that takes `jagged`."""
        return [self.embeddings, *self.dense, *(self._tensor_of(name) for name in jagged)]

    def _tensor_of(self, jagged: JaggedInput) -> Tensor:
        if jagged.kind is JaggedKind.ROWS:
            return self.rows[jagged.name]
        bag = self.bags[jagged.name]
        if jagged.kind is JaggedKind.LENGTHS:
            return bag.lengths.int()
        if jagged.kind is JaggedKind.NUMBERS:
            return bag.ids
        if jagged.kind is JaggedKind.IDS:
            return bag.ids.long()
        assert bag.weights is not None  # noqa: S101  the model takes them
        return bag.weights.float()

    def select(self, samples: Tensor) -> "DenseInputs":
        """The inputs of some samples, int64 [B']."""
        rows = {name: tensor[self.row_indices(self.keys[name], samples)] for name, tensor in self.rows.items()}
        bags = {key: bag.select(samples) for key, bag in self.bags.items()}
        dense = tuple(tensor[samples] for tensor in self.dense)
        return replace(self, embeddings=self.embeddings[samples], dense=dense, bags=bags, rows=rows)

    def row_indices(self, key: str | None, samples: Tensor) -> Tensor:
        """The indices of the rows of some samples, int64 [B'], among those for the ids of `key`.

        If `key` is None, the rows are those of samples.
        """
        if key is None:
            return samples
        bag = self.bags[key]
        return replace(bag, ids=torch.arange(len(bag.ids)), weights=None).select(samples).ids

    def copied(self) -> "DenseInputs":
        """With copies of the dense inputs, which a model may write to."""
        return replace(self, dense=tuple(tensor.clone() for tensor in self.dense))

    def with_floats(self, change: Callable[..., Tensor], *more: "DenseInputs") -> "DenseInputs":
        """With other floats as embeddings, dense inputs, numbers of ids, and rows.

        Args:
            change: takes the sample of each of m rows, int64 [m], their floats [m, …], and those of each of `more`.
            more: inputs for the same ids.
        """
        samples = torch.arange(self.samples)
        sample_of_id = {key: samples.repeat_interleave(bag.lengths.long()) for key, bag in self.bags.items()}
        rows = {
            name: change(sample_of_id[self.keys[name]], tensor, *(inputs.rows[name] for inputs in more))
            for name, tensor in self.rows.items()
        }
        bags = {
            name: replace(
                self.bags[name],
                ids=change(sample_of_id[name], *(inputs.bags[name].ids for inputs in (self, *more))),
            )
            for name in self.numbers
            if self.bags[name].ids.is_floating_point()
        }
        dense = [
            change(samples, *tensors) if tensors[0].is_floating_point() else tensors[0]
            for tensors in zip(self.dense, *(inputs.dense for inputs in more), strict=True)
        ]
        embeddings = change(samples, self.embeddings, *(inputs.embeddings for inputs in more))
        return replace(self, embeddings=embeddings, dense=tuple(dense), rows=rows, bags={**self.bags, **bags})

    def with_integers(self, change: Callable[[Tensor], Tensor]) -> "DenseInputs":
        """With other integers and booleans as dense inputs, and as numbers of ids."""

        def changed(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_floating_point() else change(tensor)

        numbers = {name: replace(self.bags[name], ids=changed(self.bags[name].ids)) for name in self.numbers}
        dense = tuple(changed(tensor) for tensor in self.dense)
        return replace(self, dense=dense, bags={**self.bags, **numbers})
