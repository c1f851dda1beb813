"""What the ranks say to a batch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serving.errors import ServingError
from serving.request.tensors import Embeddings


class Answered(NamedTuple):
    """The answer to a batch.

    Attributes:
        embeddings: the features of the batch side by side; float32 or float16 [B, D].
        failed: requests of the batch that got no answer, by their position in it. The others are not affected.
        zeroed: how many requests got zeros for a table whose host was lost, by table.
    """

    embeddings: Embeddings
    failed: Mapping[int, ServingError] = {}
    zeroed: Mapping[str, int] = {}


def failed_of(answered: Sequence[Answered]) -> Mapping[int, ServingError]:
    """Requests that got no answer from some of several batches, by their position in all of them."""
    return {position: error for each in answered for position, error in each.failed.items()}


def zeroed_of(answered: Sequence[Answered]) -> Mapping[str, int]:
    """How many requests got zeros in several batches, by table. One that got some in two batches counts twice."""
    zeroed: dict[str, int] = {}
    for each in answered:
        for table, count in each.zeroed.items():
            zeroed[table] = zeroed.get(table, 0) + count
    return zeroed
