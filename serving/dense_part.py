"""The dense part of a bundle, loaded: pooled embeddings and dense inputs in, scores out."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch

from serving.bundle.opening import Bundle
from serving.bundle.scores import SCORES, DensePart
from serving.errors import BundleError
from serving.ranks.program import load_torchscript
from serving.request.jagged import joined
from serving.request.once import spread
from serving.request.tensors import Batch, Dense, Embeddings, Outputs

# Samples of the first calls, which nobody waits for: TorchScript watches two, compiles then, and again when another
# number of samples comes. They take ten times as long as later ones.
_FIRST_CALLS = (1, 1, 1, 2, 2)


class DenseProgram:
    """The second program of a bundle, `scores.pt`.

    Attributes:
        part: what the manifest says of it.

    Raises:
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """

    def __init__(self, bundle: Bundle, part: DensePart) -> None:
        self.part = part
        path = bundle.path / SCORES
        self._forward = load_torchscript(bundle, SCORES).forward
        width = sum(table.dim for table in bundle.manifest.feature_tables)
        for samples in _FIRST_CALLS:
            dense = [np.zeros((samples, each.width), np.float32) for each in part.inputs]
            try:
                found = self._run(np.zeros((samples, width), np.float32), dense)
                shapes = [numbers.shape for numbers in found.values()]
            except (RuntimeError, ValueError) as error:
                why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
                raise BundleError(f"{path}: cannot score: {why}: export it again") from error
            if shapes != [(samples, *each.shape) for each in part.outputs]:
                raise BundleError(f"{path}: answers {shapes}: was compiled for another manifest: export it again")

    def score_batch(self, batch: Batch, embeddings: Embeddings) -> dict[int, Outputs]:
        """The scores of those requests of a batch that ask for some.

        Args:
            batch: the requests.
            embeddings: what the ranks say to the batch, float32 or float16 [B, D]. What comes once is spread in it.

        Returns:
            By the position of the request in the batch: the outputs that it asks for by name, float32 [B_r, …].
        """
        asking = [number for number, request in enumerate(batch.requests) if request.dense is not None]
        if not asking:
            return {}
        requests = [batch.requests[number] for number in asking]
        if len(asking) < len(batch.requests) or any(request.once is not None for request in requests):
            first = np.cumsum([0, *(request.height for request in batch.requests)])
            parts = [embeddings[first[number] : first[number + 1]] for number in asking]
            embeddings = joined([spread(part, each) for part, each in zip(parts, requests, strict=True)])
        dense = [request.dense for request in requests if request.dense is not None]
        scores = self.score(embeddings, dense, [each.samples for each in requests])
        return {
            number: {name: numbers for name, numbers in found.items() if name in request.outputs}
            for number, request, found in zip(asking, requests, scores, strict=True)
        }

    def score(self, embeddings: Embeddings, dense: Sequence[Dense], samples: Sequence[int]) -> list[Outputs]:
        """The scores of R requests, together unless the dense part mixes samples.

        Args:
            embeddings: all features in the manifest's order, of one request behind the other; float32 or float16
                [B, D].
            dense: the dense inputs of each request.
            samples: of each request; their sum is B.

        Returns:
            The outputs of each request by name, float32 [B_r, *shape].
        """
        ends = np.cumsum(samples).tolist()
        rows = [slice(end - count, end) for end, count in zip(ends, samples, strict=True)]
        if self.part.mixes_samples:
            return [self._run(embeddings[each], inputs) for each, inputs in zip(rows, dense, strict=True)]
        found = self._run(embeddings, [joined(each) for each in zip(*dense, strict=True)])
        return [{name: numbers[each] for name, numbers in found.items()} for each in rows]

    def _run(self, embeddings: Embeddings, dense: Dense) -> Outputs:
        if not len(embeddings):
            return {each.name: np.empty((0, *each.shape), np.float32) for each in self.part.outputs}
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors
            found = self._forward(*map(torch.from_numpy, (embeddings, *dense)))
        return {each.name: numbers.numpy() for each, numbers in zip(self.part.outputs, found, strict=True)}
