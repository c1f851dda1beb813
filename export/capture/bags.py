"""The ids of a request by key, as tensors; and KeyedJaggedTensors that know where their ids come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.jagged_tensor import _kjt_concat


@dataclass(frozen=True, eq=False, slots=True)
class Bag:
    """The ids of one key, for all samples.

    Attributes:
        ids: one sample after another; integers [n].
        lengths: how many each sample has; integers [B].
        weights: one for each id, floats [n]; None: there are none.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    def at(self, samples: Tensor) -> "Bag":
        """The ids of some samples, int64 [B']."""
        ends = self.lengths.long().cumsum(0)
        lengths = self.lengths[samples]
        starts = (ends - self.lengths)[samples]
        first = starts.repeat_interleave(lengths.long())
        within = torch.arange(len(first)) - (lengths.long().cumsum(0) - lengths).repeat_interleave(lengths.long())
        chosen = first + within
        return Bag(self.ids[chosen], lengths, None if self.weights is None else self.weights[chosen])


Bags = Mapping[str, Bag]


def bags_of(kjt: KeyedJaggedTensor) -> dict[str, Bag]:
    """The ids of a KJT by key."""
    lengths = kjt.lengths().view(len(kjt.keys()), -1)
    sizes = lengths.sum(1).tolist()
    ids = kjt.values().split(sizes)
    given = kjt.weights_or_none()
    weights = [None] * len(sizes) if given is None else given.split(sizes)
    return {key: Bag(*each) for key, each in zip(kjt.keys(), zip(ids, lengths, weights, strict=True), strict=True)}


def bag_of(jagged: JaggedTensor) -> Bag:
    """The ids of a JaggedTensor."""
    return Bag(jagged.values(), jagged.lengths(), jagged.weights_or_none())


def are_equal(one: Bag, other: Bag) -> bool:
    """Whether two bags have the same ids."""
    return torch.equal(one.ids, other.ids) and have_as_many(one, other)


def have_as_many(one: Bag, other: Bag) -> bool:
    """Whether two bags have as many ids in each sample."""
    return torch.equal(one.lengths.long(), other.lengths.long())


def as_in(jagged: KeyedJaggedTensor | JaggedTensor, bag: Bag | None, samples: int) -> Bag:
    """A bag with the dtypes that a KJT has; without ids where there is none."""
    ids, lengths, weights = jagged.values(), jagged.lengths(), jagged.weights_or_none()
    if bag is None:
        none = torch.zeros(samples, dtype=lengths.dtype)
        return Bag(ids[:0], none, None if weights is None else weights[:0])
    own = None if weights is None else (torch.ones(bag.ids.shape[0]) if bag.weights is None else bag.weights)
    return Bag(bag.ids.to(ids.dtype), bag.lengths.to(lengths.dtype), own)


def kjt_of_bags(bags: Bags) -> KeyedJaggedTensor:
    """A KJT with copies of the ids, which a model may write to."""
    values, weights, lengths = _joined(bags)
    return KeyedJaggedTensor(list(bags), values, weights, lengths)


def _joined(bags: Bags) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values, weights and lengths of a KJT."""
    parts = list(bags.values())
    weights = [each.weights for each in parts if each.weights is not None]
    return (
        torch.cat([each.ids for each in parts]),
        torch.cat(weights) if weights else None,
        torch.cat([each.lengths for each in parts]),
    )


class RequestKjt(KeyedJaggedTensor):  # type: ignore[misc]
    """Keys of a request, as the request brings them. To choose among them, or to order them, gives such ones again.

    What any other method makes of them is a KeyedJaggedTensor that may have other ids.

    Args:
        bags: by key; at least one.
    """

    def __init__(self, bags: Bags) -> None:
        self.given = dict(bags)
        parts = list(bags.values())
        sizes = [each.ids.shape[0] for each in parts]
        self.parts = _joined(bags)
        values, weights, lengths = self.parts
        super().__init__(
            keys=list(bags),
            values=values,
            weights=weights,
            lengths=lengths,
            stride=parts[0].lengths.shape[0],
            length_per_key=sizes,
            offset_per_key=[sum(sizes[:number]) for number in range(len(sizes) + 1)],
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody put other tensors in the place of its own, or of those of `to_dict`, which lookups read."""
        now = (self._values, self._weights, self._lengths)
        if list(self._keys) != list(self.given) or any(a is not b for a, b in zip(self.parts, now, strict=True)):
            return False
        if self._jt_dict is None:
            return True
        found = {key: (each._values, each._weights, each._lengths) for key, each in self._jt_dict.items()}
        own = {key: (bag.ids, bag.weights, bag.lengths) for key, bag in self.given.items()}
        return found.keys() == own.keys() and all(
            a is b for key, bag in own.items() for a, b in zip(bag, found[key], strict=True)
        )

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """As KeyedJaggedTensor.split."""
        ends = [sum(segments[: number + 1]) for number in range(len(segments))]
        return [self._of(self.keys()[end - count : end]) for count, end in zip(segments, ends, strict=True)]

    def permute(self, indices: list[int], *_: Any, **__: Any) -> KeyedJaggedTensor:
        """As KeyedJaggedTensor.permute."""
        return self._of([self.keys()[each] for each in indices])

    def to(self, *_: Any, **__: Any) -> "RequestKjt":
        """All of it is on one device."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        bag = self.given[key]
        return JaggedTensor(bag.ids, weights=bag.weights, lengths=bag.lengths)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """As KeyedJaggedTensor.to_dict, which keeps what it answers, too."""
        if self._jt_dict is None:
            self._jt_dict: dict[str, JaggedTensor] | None = {key: self[key] for key in self.given}
        return self._jt_dict or {}

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """As KeyedJaggedTensor.concat, which this takes the place of while a model is followed."""
        found: dict[str, Bag] = {}
        for each in kjt_list:
            if type(each) is not RequestKjt or not each.is_unchanged or not found.keys().isdisjoint(each.given):
                return _kjt_concat(kjt_list)
            found |= each.given
        return RequestKjt(found)

    def _of(self, keys: Sequence[str]) -> KeyedJaggedTensor:
        if not keys or not self.is_unchanged or len({*keys}) < len(keys):
            first = [self.keys().index(key) for key in keys]
            return super().permute(first) if keys else KeyedJaggedTensor.empty_like(self)
        return RequestKjt({key: self.given[key] for key in keys})
