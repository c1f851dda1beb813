"""A batch, cut into pieces that several threads look up.

A batch is feature-major. So the ids of neighbouring features lie one behind the other, and so do those of
neighbouring samples of one feature: a cut can be between any two bags, and no id is copied.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from serving.request.tensors import Ids


class Piece(NamedTuple):
    """Bags of a batch whose ids lie one behind the other.

    Attributes:
        feature, last_feature: the first feature, and the one behind the last.
        sample, last_sample: likewise. Of several features these are all samples.
    """

    feature: int
    last_feature: int
    sample: int
    last_sample: int


class Sizes:
    """The bytes that a batch over F features and B samples, at least one, reads and writes.

    Args:
        offsets: of the batch, int64 [F·B + 1].
        of_id: bytes that are read for an id of each feature [F].
        of_bag: bytes that are moved for a bag of each feature, whatever its ids [F].

    Attributes:
        samples: B.
        ends: the bytes of all features up to each, with its own [F].
    """

    # Lists, not arrays: there are few features, and this is done before any thread can begin.
    def __init__(self, offsets: Ids, of_id: Sequence[int], of_bag: Sequence[int]) -> None:
        self.samples = (offsets.size - 1) // len(of_id)
        self._offsets, self._of_id, self._of_bag = offsets, of_id, of_bag
        bounds = offsets[:: self.samples].tolist()
        bags = (self.samples * each for each in of_bag)
        ids = ((last - first) * each for (first, last), each in zip(pairwise(bounds), of_id, strict=True))
        self.ends = [*accumulate(map(int.__add__, ids, bags))]

    def place(self, share: float, slack: float) -> tuple[int, int]:
        """The feature and the sample in front of which are `share` bytes; see `cut`."""
        feature = min(bisect_right(self.ends, share), len(self.ends) - 1)
        start = self.ends[feature - 1] if feature else 0
        if share - start <= slack:
            return feature, 0
        if self.ends[feature] - share <= slack:
            return feature + 1, 0
        first_bag = feature * self.samples
        first_id = int(self._offsets[first_bag])

        def before(sample: int) -> int:
            ids = int(self._offsets[first_bag + sample]) - first_id
            return ids * self._of_id[feature] + sample * self._of_bag[feature]

        sample = bisect_left(range(self.samples), share - start, key=before)
        return (feature, sample) if sample < self.samples else (feature + 1, 0)


def cut(sizes: Sizes, shares: Sequence[float], slack: float) -> list[list[Piece]]:
    """Cut a batch into parts, each of pieces that lie one behind the other.

    Args:
        sizes: of the batch.
        shares: of each part, in bytes. No bag is divided: a cut is one bag away from where it should be at most.
        slack: a cut moves by so many bytes, if it is between two features then: that saves a call.

    Returns:
        As many parts as shares, of three pieces at most. Parts may be empty.
    """
    cuts = [(0, 0)]
    for share in [*accumulate(shares)][:-1]:
        cuts.append(max(cuts[-1], sizes.place(share, slack)))
    cuts.append((len(sizes.ends), 0))
    return [[*_between(first, last, sizes.samples)] for first, last in pairwise(cuts)]


def _between(first: tuple[int, int], last: tuple[int, int], samples: int) -> Iterator[Piece]:
    """The pieces from one place to another, places being (feature, sample)."""
    (feature, sample), (last_feature, last_sample) = first, last
    if sample and feature < last_feature:
        yield Piece(feature, feature + 1, sample, samples)
        feature, sample = feature + 1, 0
    if feature < last_feature:
        yield Piece(feature, last_feature, 0, samples)
        feature = last_feature
    if sample < last_sample:
        yield Piece(feature, feature + 1, sample, last_sample)
