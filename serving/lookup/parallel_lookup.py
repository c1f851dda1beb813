"""The lookup of a large batch by several threads, each of which looks up some pieces of it.

A batch is feature-major: the ids of neighbouring features are adjacent, as are the ids of neighbouring samples of a
feature. So a cut can be between any two bags, and no id is copied. Each thread calls the program for its pieces,
block by block.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype
from serving.lookup.buffer_pool import BufferPool
from serving.lookup.threads import Threads
from serving.requests.batches import Batch
from serving.requests.types import Embeddings, Ids


class Piece(NamedTuple):
    """Bags of a batch whose ids are adjacent: features [feature, last_feature), samples [sample, last_sample).

    A piece of several features has all samples.
    """

    feature: int
    last_feature: int
    sample: int
    last_sample: int


class Sizes:
    """The bytes that the lookup of a batch over F features and B samples reads and writes.

    Args:
        offsets: the offsets of the batch, int64 [F·B + 1]. B is at least 1.
        of_id: the cost of an id of each feature in bytes [F].
        of_bag: the cost of a bag of each feature in bytes, without its ids [F].

    Attributes:
        samples: B.
        ends: the sum of the bytes of each feature and all before it [F].
    """

    # Lists, not arrays: they are faster for few features, and no thread can start before this is done.
    def __init__(self, offsets: Ids, of_id: Sequence[int], of_bag: Sequence[int]) -> None:
        self.samples = (offsets.size - 1) // len(of_id)
        self._offsets, self._of_id, self._of_bag = offsets, of_id, of_bag
        bounds = offsets[:: self.samples].tolist()
        bags = (self.samples * bags_per_sample for bags_per_sample in of_bag)
        ids = (
            (last - first) * bytes_per_id for (first, last), bytes_per_id in zip(pairwise(bounds), of_id, strict=True)
        )
        self.ends = [*accumulate(map(int.__add__, ids, bags))]

    def cut_position(self, share: float, slack: float) -> tuple[int, int]:
        """The feature and the sample after the cut with `share` bytes before it. `slack` as for `cut`."""
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
    """Cut a batch into parts of adjacent pieces.

    Args:
        sizes: the sizes of the batch.
        shares: the size of each part in bytes. Bags are not divided, so a cut may be off by one bag.
        slack: the bytes by which a cut may be moved to lie between two features, which saves a call.

    Returns:
        A part for each share, in order: at most three pieces.
    """
    cuts = [(0, 0)]
    for share in [*accumulate(shares)][:-1]:
        cuts.append(max(cuts[-1], sizes.cut_position(share, slack)))
    cuts.append((len(sizes.ends), 0))
    return [[*_between(first, last, sizes.samples)] for first, last in pairwise(cuts)]


def _between(first: tuple[int, int], last: tuple[int, int], samples: int) -> Iterator[Piece]:
    """The pieces between two cuts, each as (feature, sample)."""
    (feature, sample), (last_feature, last_sample) = first, last
    if sample and feature < last_feature:
        yield Piece(feature, feature + 1, sample, samples)
        feature, sample = feature + 1, 0
    if feature < last_feature:
        yield Piece(feature, last_feature, 0, samples)
        feature = last_feature
    if sample < last_sample:
        yield Piece(feature, feature + 1, sample, last_sample)


# Costs, in bytes that are read and written. Figures: docs/decisions/0011-request-path.md.
# The minimum work of a thread.
LEAST = 8 << 20
# Maximum bytes of the answer of a call, so that it is still in the core's cache when it is copied.
BLOCK = 1 << 19
# Finding a row takes about as long as reading OF_AN_ID bytes. If no cache holds its table, it takes as long as MISS.
OF_AN_ID = 64
LARGE_TABLE = 32 << 20
MISS = 288
# The additional work of the calling thread, which works while the others wake up instead of waiting for them.
HEAD_START = 1 << 19
# The cost of another call of the program.
CALL = 1 << 17
# How often the answer to a block is written: by the program, and as a copy in the whole answer.
_MOVES = 2


class ParallelLookup:
    """Looks up batches by the program of a bundle, on several threads.

    Args:
        look_up: `look_up_pieces` of a program.
        manifest: the manifest of the bundle.
        threads: the number of threads that look up, the calling one included.
    """

    def __init__(self, look_up: Callable[..., None], manifest: Manifest, threads: int) -> None:
        dtype = torch.float16 if manifest.output_dtype is OutputDtype.FP16 else torch.float32
        self._itemsize = dtype.itemsize
        tables = manifest.feature_tables
        is_large = np.array([table.rows * table.row_bytes >= LARGE_TABLE for table in tables])
        self._id_bytes = np.array([table.row_bytes for table in tables]) + np.where(is_large, MISS, OF_AN_ID)
        self._bag_bytes = np.array([table.dim for table in tables]) * (_MOVES * self._itemsize)
        self._most = int(self._id_bytes.max()), int(self._bag_bytes.max())
        self._memory = BufferPool(dtype)
        self._look_up = look_up
        self._count = threads
        self._threads = Threads(threads - 1)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def answer(self, batch: Batch) -> Embeddings | None:
        """The embeddings [B, D], bit for bit as one call of the program would, or None for a small batch.

        Their memory is reused once nothing refers to it.
        """
        feature_set, offsets = batch.feature_set, batch.offsets
        bags = offsets.size - 1
        if not bags or batch.values.size * self._most[0] + bags * self._most[1] < 2 * LEAST:
            return None
        positions = feature_set.positions
        sizes = Sizes(offsets, self._id_bytes[positions].tolist(), self._bag_bytes[positions].tolist())
        total = float(sizes.ends[-1])
        threads = min(self._count, int(total // max(LEAST, 1)))
        if threads < 2:
            return None
        share = max(total - HEAD_START, 0) / threads
        parts = cut(sizes, [total - (threads - 1) * share, *[share] * (threads - 1)], CALL)
        columns = [0, *feature_set.ends.tolist()]
        answer = self._memory.array(sizes.samples, columns[-1])
        # As TorchScript, it is one call into torch for each thread, which releases Python's lock. With a call for
        # each operator, threads wait for that lock again and again.
        look_up = partial(
            self._look_up,
            torch.from_numpy(batch.values),
            torch.from_numpy(offsets),
            None if batch.weights is None else torch.from_numpy(batch.weights),
            torch.from_numpy(feature_set.positions),
            columns,
            torch.from_numpy(answer),
            BLOCK // self._itemsize,
        )
        self._threads.run([partial(look_up, part) for part in parts if part])
        return answer


def look_up_pieces(
    self: Any,
    values: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    features: Tensor,
    columns: list[int],
    answer: Tensor,
    block: int,
    pieces: list[tuple[int, int, int, int]],
) -> None:
    """Look up pieces, block by block, and write them to `answer`. This code is Python and TorchScript.

    Args:
        values, offsets, per_sample_weights, features: see `serving.lookup.batch_answer.program_arguments`.
            features is int64 [F].
        columns: the first column of each feature in the answer, then D [F + 1].
        answer: the answer to the whole batch, [B, D] in the program's dtype. Only the pieces are written.
        block: the maximum numbers that a call of the program returns; a call returns at least one bag.
        pieces: the pieces, as tuples of the fields of `Piece`.
    """
    samples = answer.size(0)
    for feature, last_feature, first_sample, last_sample in pieces:
        first = feature
        while first < last_feature:
            # A block is as many whole features as it holds, or else some samples of one feature.
            last = first + 1
            while last < last_feature and (columns[last + 1] - columns[first]) * samples <= block:
                last += 1
            column, width = columns[first], columns[last] - columns[first]
            step = samples if last - first > 1 else max(block // max(width, 1), 1)
            for sample in range(first_sample, last_sample, step):
                rows = min(step, last_sample - sample)
                bag, bags = first * samples + sample, (last - first - 1) * samples + rows
                id_ = int(offsets[bag])
                ids = int(offsets[bag + bags]) - id_
                weights: Tensor | None = None
                if per_sample_weights is not None:
                    weights = per_sample_weights.narrow(0, id_, ids)
                pooled = self.forward(
                    values.narrow(0, id_, ids),
                    offsets.narrow(0, bag, bags + 1) - id_,
                    weights,
                    features.narrow(0, first, last - first),
                )
                answer.narrow(0, sample, rows).narrow(1, column, width).copy_(pooled)
            first = last
