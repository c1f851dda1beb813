"""What the ranks say to a batch."""

from collections.abc import Mapping
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
