"""The ids of a request by key, as tensors; and a KeyedJaggedTensor that knows which keys of the request it has."""

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
        lengths: the number of ids of each sample; integers [B].
        weights: of each id, floats [n]; None if the key has no weights.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    def select(self, samples: Tensor) -> "Bag":
        """The ids of some samples, int64 [B']."""
        ends = self.lengths.long().cumsum(0)
        lengths = self.lengths[samples]
        starts = (ends - self.lengths)[samples]
        first = starts.repeat_interleave(lengths.long())
        within = torch.arange(len(first)) - (lengths.long().cumsum(0) - lengths).repeat_interleave(lengths.long())
        indices = first + within
        return Bag(self.ids[indices], lengths, None if self.weights is None else self.weights[indices])


Bags = Mapping[str, Bag]


def bags_of(kjt: KeyedJaggedTensor) -> dict[str, Bag]:
    """The ids of a KJT by key."""
    lengths = kjt.lengths().view(len(kjt.keys()), -1)
    sizes = lengths.sum(1).tolist()
    ids = kjt.values().split(sizes)
    kjt_weights = kjt.weights_or_none()
    weights = [None] * len(sizes) if kjt_weights is None else kjt_weights.split(sizes)
    return {key: Bag(*parts) for key, parts in zip(kjt.keys(), zip(ids, lengths, weights, strict=True), strict=True)}


def bag_of(jagged: JaggedTensor) -> Bag:
    """The ids of a JaggedTensor."""
    return Bag(jagged.values(), jagged.lengths(), jagged.weights_or_none())


def have_same_ids(one: Bag, other: Bag) -> bool:
    """Whether two bags have the same ids in each sample."""
    return torch.equal(one.ids, other.ids) and have_same_lengths(one, other)


def have_same_lengths(one: Bag, other: Bag) -> bool:
    """Whether two bags have equally many ids in each sample."""
    return torch.equal(one.lengths.long(), other.lengths.long())


def with_dtypes_of(jagged: KeyedJaggedTensor | JaggedTensor, bag: Bag | None, samples: int) -> Bag:
    """`bag` with the dtypes of a KJT or JaggedTensor. If it is None, a bag without ids for that many samples."""
    ids, lengths, weights = jagged.values(), jagged.lengths(), jagged.weights_or_none()
    if bag is None:
        no_lengths = torch.zeros(samples, dtype=lengths.dtype)
        return Bag(ids[:0], no_lengths, None if weights is None else weights[:0])
    bag_weights = torch.ones(bag.ids.shape[0]) if bag.weights is None else bag.weights
    return Bag(bag.ids.to(ids.dtype), bag.lengths.to(lengths.dtype), None if weights is None else bag_weights)


def kjt_of_bags(bags: Bags) -> KeyedJaggedTensor:
    """A KJT with copies of the ids, which a model may write to."""
    values, weights, lengths = _concatenated(bags)
    return KeyedJaggedTensor(list(bags), values, weights, lengths)


def _concatenated(bags: Bags) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values, weights and lengths of a KJT."""
    weights = [bag.weights for bag in bags.values() if bag.weights is not None]
    return (
        torch.cat([bag.ids for bag in bags.values()]),
        torch.cat(weights) if weights else None,
        torch.cat([bag.lengths for bag in bags.values()]),
    )


class RequestKjt(KeyedJaggedTensor):  # type: ignore[misc]
    """A KJT whose keys have the ids of a request, unchanged.

    Selecting, splitting, ordering and joining keys returns such a KJT again. Any other method returns a
    KeyedJaggedTensor, which may have other ids.

    Args:
        bags: by key; at least one.
    """

    def __init__(self, bags: Bags) -> None:
        self.bags = dict(bags)
        sizes = [bag.ids.shape[0] for bag in bags.values()]
        self.parts = _concatenated(bags)
        values, weights, lengths = self.parts
        super().__init__(
            keys=list(bags),
            values=values,
            weights=weights,
            lengths=lengths,
            stride=next(iter(bags.values())).lengths.shape[0],
            length_per_key=sizes,
            offset_per_key=[sum(sizes[:number]) for number in range(len(sizes) + 1)],
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether it still has its own tensors, and its cache of `to_dict`, which lookups read, has them too."""
        parts = (self._values, self._weights, self._lengths)
        if list(self._keys) != list(self.bags) or any(a is not b for a, b in zip(self.parts, parts, strict=True)):
            return False
        if self._jt_dict is None:
            return True
        cached = {key: (jagged._values, jagged._weights, jagged._lengths) for key, jagged in self._jt_dict.items()}
        original = {key: (bag.ids, bag.weights, bag.lengths) for key, bag in self.bags.items()}
        return cached.keys() == original.keys() and all(
            a is b for key, tensors in original.items() for a, b in zip(tensors, cached[key], strict=True)
        )

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """As KeyedJaggedTensor.split."""
        ends = [sum(segments[: number + 1]) for number in range(len(segments))]
        return [self._select_keys(self.keys()[end - count : end]) for count, end in zip(segments, ends, strict=True)]

    def permute(self, indices: list[int], *_: Any, **__: Any) -> KeyedJaggedTensor:
        """As KeyedJaggedTensor.permute."""
        return self._select_keys([self.keys()[index] for index in indices])

    def to(self, *_: Any, **__: Any) -> "RequestKjt":
        """Itself: all tensors are on one device."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        bag = self.bags[key]
        return JaggedTensor(bag.ids, weights=bag.weights, lengths=bag.lengths)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """As KeyedJaggedTensor.to_dict, which caches its result too."""
        if self._jt_dict is None:
            self._jt_dict: dict[str, JaggedTensor] | None = {key: self[key] for key in self.bags}
        return self._jt_dict or {}

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """As KeyedJaggedTensor.concat, which this replaces during a trace."""
        bags: dict[str, Bag] = {}
        for kjt in kjt_list:
            if type(kjt) is not RequestKjt or not kjt.is_unchanged or not bags.keys().isdisjoint(kjt.bags):
                return _kjt_concat(kjt_list)
            bags |= kjt.bags
        return RequestKjt(bags)

    def _select_keys(self, keys: Sequence[str]) -> KeyedJaggedTensor:
        if not keys:
            return KeyedJaggedTensor.empty_like(self)
        if not self.is_unchanged or len({*keys}) < len(keys):
            return super().permute([self.keys().index(key) for key in keys])
        return RequestKjt({key: self.bags[key] for key in keys})
