"""The programs of a dense part for many items of one user: what depends on the user alone is computed once.

A request that sends exactly the bundle's user side once is scored by them, apart from others: its rows of the user
are not repeated. The items are scored some at a time, so that intermediate results stay in the processor's caches.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from serving.bundle.load import Bundle
from serving.bundle.scores import DensePart
from serving.lookup.dense_files import load_user_side
from serving.requests.jagged_inputs import sample_bounds
from serving.requests.types import Array, Embeddings, Outputs

# Items that are scored at a time; the last ones by half of it, and then the rest, because oneDNN gets few numbers of
# rows (`serving.lookup.gemm`).
SLICE = 128


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
        keys = {feature.name: feature.key for feature in bundle.manifest.features}
        self.of_user = part.user_arguments(keys)
        count = len(part.by_sample) + len(part.jagged)
        self._of_items = [number for number in range(count) if number not in self.of_user]
        first = len(part.by_sample)
        jagged = tuple(part.jagged[number - first] for number in self._of_items if number >= first)
        self._dense_count = len(self._of_items) - len(jagged)
        self._bounds = sample_bounds(bundle.manifest, msgspec.structs.replace(part, jagged=jagged))
        self._has_jagged = bool(jagged)

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
        samples = len(embeddings)
        of_items = [inputs[number] for number in self._of_items]
        starts = [0, samples]
        if not self._has_jagged or self._bounds is not None:
            starts = _starts(samples)
        bounds: list[Sequence[int]] = [starts] * self._dense_count
        if len(starts) > 2 and self._bounds is not None:
            bounds += self._bounds(of_items[self._dense_count :], starts)
        else:
            bounds += [[0, len(array)] for array in of_items[self._dense_count :]]
        with torch.inference_mode():
            user = self._user(*_tensors([embeddings[:1], *(inputs[number] for number in self.of_user)]))
            slices = []
            for number, (first, last) in enumerate(pairwise(starts)):
                arrays = [
                    array[ends[number] : ends[number + 1]] for array, ends in zip(of_items, bounds, strict=True)
                ]
                slices.append(self._items(*_tensors([embeddings[first:last], *arrays]), *user))
        outputs = zip(self._part.outputs, zip(*slices, strict=True), strict=True)
        return {
            output.name: np.concatenate([tensor.numpy() for tensor in tensors])
            if len(tensors) > 1
            else tensors[0].numpy()
            for output, tensors in outputs
        }


def _starts(samples: int) -> list[int]:
    """Where slices start, and the end of the last one."""
    starts = [*range(0, samples, SLICE), samples]
    if samples - starts[-2] > SLICE // 2:
        starts.insert(-1, starts[-2] + SLICE // 2)
    return starts


def _tensors(arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
