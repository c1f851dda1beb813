"""What the dense part of a model is given for some samples: embeddings, dense inputs, and ids with their rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from export.capture.bags import Bag, Bags
from serving.bundle.scores import JaggedInput, JaggedKind


@dataclass(frozen=True, eq=False, slots=True)
class Given:
    """What a dense part is given.

    Attributes:
        embeddings: of all pooled features side by side, floats [B, D].
        dense: its dense inputs, [B, *shape] each.
        bags: the ids of the request, by key.
        rows: of each feature that is not pooled, floats [n, dim].
        keys: the key of each of these features.
        fixed: the keys that have as many ids in each sample, and how many.
    """

    embeddings: Tensor
    dense: tuple[Tensor, ...]
    bags: Bags = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """B."""
        return len(self.embeddings)

    def tensors(self, jagged: Sequence[JaggedInput]) -> list[Tensor]:
        """The arguments of a dense part that takes `jagged`."""
        return [self.embeddings, *self.dense, *(self._of(each) for each in jagged)]

    def _of(self, wanted: JaggedInput) -> Tensor:
        if wanted.kind is JaggedKind.ROWS:
            return self.rows[wanted.name]
        bag = self.bags[wanted.name]
        if wanted.kind is JaggedKind.LENGTHS:
            return bag.lengths.int()
        if wanted.kind is JaggedKind.IDS:
            return bag.ids.long()
        assert bag.weights is not None  # noqa: S101  the model takes them
        return bag.weights.float()

    def at(self, samples: Tensor) -> "Given":
        """Some samples, int64 [B']."""
        rows = {name: _rows_at(self.bags[self.keys[name]], each, samples) for name, each in self.rows.items()}
        bags = {key: bag.at(samples) for key, bag in self.bags.items()}
        return Given(
            self.embeddings[samples], tuple(each[samples] for each in self.dense), bags, rows, self.keys, self.fixed
        )

    def copied(self) -> "Given":
        """With dense inputs that may be written to."""
        return replace(self, dense=tuple(each.clone() for each in self.dense))

    def with_floats(self, change: Callable[..., Tensor], *others: "Given") -> "Given":
        """With other floats in place of embeddings, dense inputs and rows.

        Args:
            change: takes the sample of each of m rows, int64 [m], their floats [m, …], and those of each of `others`.
            others: for the same ids.
        """
        every = torch.arange(self.samples)
        rows = {}
        for name, each in self.rows.items():
            lengths = self.bags[self.keys[name]].lengths.long()
            rows[name] = change(every.repeat_interleave(lengths), each, *(other.rows[name] for other in others))
        dense = [
            change(every, *both) if both[0].is_floating_point() else both[0]
            for both in zip(self.dense, *(other.dense for other in others), strict=True)
        ]
        embeddings = change(every, self.embeddings, *(other.embeddings for other in others))
        return replace(self, embeddings=embeddings, dense=tuple(dense), rows=rows)


def _rows_at(bag: Bag, rows: Tensor, samples: Tensor) -> Tensor:
    """The rows of some samples."""
    return rows[replace(bag, ids=torch.arange(len(rows)), weights=None).at(samples).ids]
