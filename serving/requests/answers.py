"""Split an answer into its features. Nothing is copied."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from serving.requests.offsets import bounds_of
from serving.requests.types import Embeddings, Ids, Lengths


@dataclass(frozen=True, eq=False)
class JaggedRows:
    """A row for each id of a feature, as TorchRec's JaggedTensor.

    Attributes:
        values: the rows, in the order of the ids; float32 or float16 [n, dim].
        lengths: the number of rows of each sample, as in the request; int32 [B].
    """

    values: Embeddings
    lengths: Lengths

    def __len__(self) -> int:
        """The number of samples, B."""
        return len(self.lengths)

    def rows(self, sample: int) -> Embeddings:
        """The rows of a sample, [n of the sample, dim]: a view.

        Raises:
            IndexError: the sample does not exist.
        """
        index = range(len(self.lengths))[sample]  # a negative index counts from the end
        return self.values[self._bounds[index] : self._bounds[index + 1]]

    @cached_property
    def _bounds(self) -> Ids:
        """Where the rows of each sample begin, then n: int64 [B + 1]."""
        return bounds_of(self.lengths.astype(np.int64))


def decode(embeddings: Embeddings, dims: Mapping[str, int]) -> dict[str, Embeddings]:
    """Cut an answer into its features. Nothing is copied.

    Args:
        embeddings: float32 or float16 [B, D].
        dims: the columns of each feature, in the order of the answer.

    Returns:
        {feature: [B, dim]}, views of `embeddings`.
    """
    ends = np.cumsum(list(dims.values()))
    return {name: embeddings[:, end - dim : end] for (name, dim), end in zip(dims.items(), ends, strict=True)}


def decode_rows(numbers: Embeddings, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Embeddings]:
    """Cut rows into their features, or tables. Nothing is copied.

    Args:
        numbers: float32 or float16 [M].
        shapes: the shape (n, dim) of each feature or table, in the order of the answer.

    Returns:
        {feature: [n, dim]}, views of `numbers`.
    """
    ends = accumulate(n * dim for n, dim in shapes.values())
    return {
        name: numbers[end - n * dim : end].reshape(n, dim)
        for (name, (n, dim)), end in zip(shapes.items(), ends, strict=True)
    }
