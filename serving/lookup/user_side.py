"""The programs of a dense part for many items of one user: what depends on the user alone is computed once.

A request that sends exactly the bundle's user side once is scored by them, apart from others: its rows of the user
are not repeated. The items are scored some at a time, so that intermediate results stay in the processor's caches.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from serving.bundle.load import Bundle
from serving.bundle.scores import DensePart
from serving.lookup.dense_files import load_user_side
from serving.requests.jagged_inputs import sample_bounds
from serving.requests.offsets import concatenate
from serving.requests.types import Array, Embeddings, Outputs

# How many items are scored at a time. There are few sizes, because oneDNN gets few numbers of rows
# (`serving.lookup.gemm`).
SLICES = (256, 128, 64)
# A slice may begin before the end of the slice before it, and score up to an eighth of its items a second time.
_SHARE_AGAIN = 8


class UserSidePrograms:
    """The programs of a bundle's user side.

    Attributes:
        of_user: the inputs that are the user's, by their numbers among those that `score` takes.

    Raises:
        BundleError: a file changed after the export.
        Exception: torch cannot load a file.
    """

    def __init__(self, bundle: Bundle, part: DensePart) -> None:
        self._part = part
        self._user, self._items = load_user_side(bundle)
        shared = () if part.user_side is None else part.user_side.names
        self.of_user = part.arguments_of(shared, bundle.manifest.key_of_feature)
        count = len(part.by_sample) + len(part.jagged)
        self._of_items = [number for number in range(count) if number not in self.of_user]
        first = len(part.by_sample)
        jagged = tuple(part.jagged[number - first] for number in self._of_items if number >= first)
        self._dense_count = len(self._of_items) - len(jagged)
        self._bounds = sample_bounds(bundle.manifest, msgspec.structs.replace(part, jagged=jagged))
        self._has_jagged = bool(jagged)
        # Items that are scored twice have two rows in an output. With rows for each id, they are not counted.
        self._may_overlap = all(output.key is None for output in part.outputs)

    def score(self, embeddings: Embeddings, inputs: Sequence[Array]) -> Outputs:
        """Score the items of one request.

        Args:
            embeddings: all pooled features in the manifest's order, float32 or float16 [B, D]. The user's columns
                are read in row 0 alone.
            inputs: the dense inputs with a row for each sample, then the jagged inputs, in the manifest's order.
                Those of the user have one sample.

        Returns:
            The outputs by name, [B, *shape]; [n, *shape] with a row for each id of a key.
        """
        of_items = [inputs[number] for number in self._of_items]
        jagged = of_items[self._dense_count :]
        slices = [(0, len(embeddings))]
        if not self._has_jagged or self._bounds is not None:
            slices = slices_of(len(embeddings), may_overlap=self._may_overlap)
        ends = [item for first_and_last in slices for item in first_and_last]
        bounds: list[Sequence[int]] = [ends] * self._dense_count
        if len(slices) > 1 and self._bounds is not None:
            bounds += self._bounds(jagged, ends)
        else:
            bounds += [[0, len(array)] for array in jagged]
        answers, scored = [], 0
        with torch.inference_mode():
            user = self._user(*_tensors([embeddings[:1], *(inputs[number] for number in self.of_user)]))
            for number, (first, last) in enumerate(slices):
                arrays = [
                    array[rows[2 * number] : rows[2 * number + 1]]
                    for array, rows in zip(of_items, bounds, strict=True)
                ]
                answer = self._items(*_tensors([embeddings[first:last], *arrays]), *user)
                answers.append([tensor[scored - first :].numpy() for tensor in answer])
                scored = last
        outputs = zip(self._part.outputs, zip(*answers, strict=True), strict=True)
        return {output.name: concatenate(arrays) for output, arrays in outputs}


def slices_of(samples: int, *, may_overlap: bool) -> list[tuple[int, int]]:
    """The slices of some items: the first item of each, and the one after its last.

    Args:
        samples: the number of items.
        may_overlap: whether a slice may begin before the end of the slice before it.
    """
    slices: list[tuple[int, int]] = []
    scored = 0
    for size in SLICES:
        again = size // _SHARE_AGAIN if may_overlap else 0
        while size <= samples and samples - scored >= size - again:
            first = min(scored, samples - size)
            slices.append((first, first + size))
            scored = first + size
    if scored < samples:
        slices.append((scored, samples))
    return slices


def _tensors(arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
