"""What the dense part of a model is given for some samples: embeddings, dense inputs, and ids with their rows; and
what each of these is called in a graph.
"""

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
    """How many ids of a key each sample has, integers [B]."""
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
    """What a dense part is given.

    Attributes:
        embeddings: of all pooled features side by side, floats [B, D].
        dense: its dense inputs with a row for each sample, [B, *shape] each.
        bags: the ids of the request, by key; and those dense inputs that have a row for each id of a key, by name.
        rows: of each feature that is not pooled, floats [n, dim].
        keys: the key of each of these features, and of these dense inputs.
        fixed: the keys that have as many ids in each sample, and how many.
        first: of keys that have as many ids in each sample as another one, that one.
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

    def key_of(self, key: str) -> str:
        """The first key that has as many ids in each sample, of a key, or of what has rows for ids of one."""
        of = self.keys.get(key, key)
        return self.first.get(of, of)

    @property
    def numbers(self) -> list[str]:
        """The dense inputs that have a row for each id of a key."""
        return [name for name in self.bags if name in self.keys and name not in self.rows]

    def tensors(self, jagged: Sequence[JaggedInput]) -> list[Tensor]:
        """The arguments of a dense part that takes `jagged`."""
        return [self.embeddings, *self.dense, *(self._of(each) for each in jagged)]

    def _of(self, wanted: JaggedInput) -> Tensor:
        if wanted.kind is JaggedKind.ROWS:
            return self.rows[wanted.name]
        bag = self.bags[wanted.name]
        if wanted.kind is JaggedKind.LENGTHS:
            return bag.lengths.int()
        if wanted.kind is JaggedKind.NUMBERS:
            return bag.ids
        if wanted.kind is JaggedKind.IDS:
            return bag.ids.long()
        assert bag.weights is not None  # noqa: S101  the model takes them
        return bag.weights.float()

    def at(self, samples: Tensor) -> "DenseInputs":
        """Some samples, int64 [B']."""
        rows = {name: each[self.places(self.keys[name], samples)] for name, each in self.rows.items()}
        bags = {key: bag.at(samples) for key, bag in self.bags.items()}
        dense = tuple(each[samples] for each in self.dense)
        return replace(self, embeddings=self.embeddings[samples], dense=dense, bags=bags, rows=rows)

    def places(self, key: str | None, samples: Tensor) -> Tensor:
        """Where the rows of some samples, int64 [B'], are among those of the ids of a key; None: among samples."""
        if key is None:
            return samples
        bag = self.bags[key]
        return replace(bag, ids=torch.arange(len(bag.ids)), weights=None).at(samples).ids

    def copied(self) -> "DenseInputs":
        """With dense inputs that may be written to."""
        return replace(self, dense=tuple(each.clone() for each in self.dense))

    def with_floats(self, change: Callable[..., Tensor], *others: "DenseInputs") -> "DenseInputs":
        """With other floats in place of embeddings, dense inputs, numbers of ids, and rows.

        Args:
            change: takes the sample of each of m rows, int64 [m], their floats [m, …], and those of each of `others`.
            others: for the same ids.
        """
        every = torch.arange(self.samples)
        of_ids = {key: every.repeat_interleave(bag.lengths.long()) for key, bag in self.bags.items()}
        rows = {
            name: change(of_ids[self.keys[name]], each, *(other.rows[name] for other in others))
            for name, each in self.rows.items()
        }
        bags = {
            name: replace(self.bags[name], ids=change(of_ids[name], *(one.bags[name].ids for one in (self, *others))))
            for name in self.numbers
            if self.bags[name].ids.is_floating_point()
        }
        dense = [
            change(every, *both) if both[0].is_floating_point() else both[0]
            for both in zip(self.dense, *(other.dense for other in others), strict=True)
        ]
        embeddings = change(every, self.embeddings, *(other.embeddings for other in others))
        return replace(self, embeddings=embeddings, dense=tuple(dense), rows=rows, bags={**self.bags, **bags})

    def with_integers(self, change: Callable[[Tensor], Tensor]) -> "DenseInputs":
        """With other integers and booleans in place of dense inputs, and of numbers of ids."""
        numbers = {name: replace(self.bags[name], ids=_changed(self.bags[name].ids, change)) for name in self.numbers}
        dense = tuple(_changed(each, change) for each in self.dense)
        return replace(self, dense=dense, bags={**self.bags, **numbers})


def _changed(numbers: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return numbers if numbers.is_floating_point() else change(numbers)
