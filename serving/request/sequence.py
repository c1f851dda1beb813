"""The answer of a feature that is not pooled."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.request.jagged import bounds_of
from serving.request.tensors import Embeddings, Ids, Lengths


@dataclass(frozen=True, eq=False)
class Sequence:
    """A row for each id of a feature, as TorchRec's JaggedTensor.

    Attributes:
        values: the rows, in the order of the ids; float32 or float16 [n, dim].
        lengths: how many each sample has, as the request said; int32 [B].
    """

    values: Embeddings
    lengths: Lengths

    def __len__(self) -> int:
        """The number of samples, B."""
        return len(self.lengths)

    def rows(self, sample: int) -> Embeddings:
        """The rows of a sample, [n of the sample, dim]: a view.

        Raises:
            IndexError: there is no such sample.
        """
        at = range(len(self.lengths))[sample]
        return self.values[self._bounds[at] : self._bounds[at + 1]]

    @cached_property
    def _bounds(self) -> Ids:
        """Where the rows of each sample begin, then n: int64 [B + 1]."""
        return bounds_of(self.lengths.astype(np.int64))
