"""The dense part of a bundle with scores: its second program, called with what was looked up."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
import torch

from serving.bundle.load import Bundle
from serving.bundle.manifest import Manifest
from serving.bundle.scores import SCORES, DensePart, JaggedKind
from serving.errors import BundleError
from serving.lookup.gemm import prefer_onednn
from serving.lookup.program import load_torchscript
from serving.requests.batches import Batch, CombinedBatch, PooledBatch, unmerge_rows
from serving.requests.jagged_inputs import jagged_inputs, sample_bounds, zero_jagged
from serving.requests.offsets import concatenate
from serving.requests.schema import ScoringSchema
from serving.requests.types import Array, Embeddings, Outputs, ValidatedRequests

# Batch sizes of the calls that are made while loading. TorchScript observes two calls, compiles at the next one, and
# again at the first with another batch size. These calls take ten times as long as later ones.
_FIRST_CALLS = (1, 1, 1, 2, 2)
# So many samples are scored at a time where sequences are padded: what is made of them then stays in the processor's
# caches (docs/decisions/0007-dense-part.md).
SLICE = 64
# What they raise if a program does not fit its manifest.
_FAILURES = (RuntimeError, ValueError, MemoryError)


class DenseProgram:
    """The second program of a bundle, `scores.pt`.

    Attributes:
        part: its description in the manifest.

    Raises:
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """

    def __init__(self, bundle: Bundle, schema: ScoringSchema) -> None:
        self.part = part = schema.dense_part
        self._schema = schema
        path = bundle.path / SCORES
        program = load_torchscript(bundle, SCORES)
        prefer_onednn(program)
        self._forward = program.forward
        self._dtype = bundle.manifest.output_dtype.numpy
        features = schema.all_features
        self._width = int(features.dims[~features.sequence].sum())
        self._bounds = sample_bounds(bundle.manifest, part)
        self._by_sample = len(part.by_sample)
        self._rows_at = _rows_at(bundle.manifest, part)
        _warn_of_read_only()
        for samples in _FIRST_CALLS:
            try:
                answers = [*self._first_call(bundle.manifest, samples, 1).values()]
            except _FAILURES as error:
                why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
                raise BundleError(f"{path}: cannot score: {why}: export it again") from error
            counts = [1 if each.key is None else part.fixed_lengths.get(each.key, 1) for each in part.outputs]
            said = [
                (each.dtype.numpy, (samples * n, *each.shape)) for n, each in zip(counts, part.outputs, strict=True)
            ]
            if (given := [(each.dtype, each.shape) for each in answers]) != said:
                what = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in given)
                raise BundleError(f"{path}: answers {what}: was compiled for another manifest: export it again")
        if part.jagged:
            # A model may fail without ids. Then so does such a request, alone.
            with suppress(*_FAILURES):
                self._first_call(bundle.manifest, 1, 0)

    def _first_call(self, manifest: Manifest, samples: int, ids: int) -> Outputs:
        """Score zeros: so many samples, each with so many ids of each key, or as many as the model takes."""
        part = self.part
        dense = [np.zeros((samples, *each.shape), each.dtype.numpy) for each in part.by_sample]
        jagged = zero_jagged(manifest, part, samples, ids)
        return self._run(np.zeros((samples, self._width), self._dtype), [*dense, *jagged])

    def score_all(
        self, validated: ValidatedRequests, batches: Sequence[Batch], answers: Sequence[Embeddings]
    ) -> dict[int, Outputs]:
        """Score those requests that ask for scores.

        Args:
            validated: the requests.
            batches: what was looked up for them.
            answers: the ranks' answer to each batch, float32 or float16. Before scoring, the row of a feature that a
                request sends once is repeated for each of its samples.

        Returns:
            By the position of the request in `validated`: the outputs that it asks for by name, [B_r, …], or
            [n_r, …] with a row for each id of a key.
        """
        asking = [number for number, request in enumerate(validated.requests) if request.dense is not None]
        if not asking:
            return {}
        rows = unmerge_rows(batches, answers) if self.part.jagged else {}
        samples, inputs = list[int](), list[Sequence[Array]]()
        for number in asking:
            request = validated.requests[number]
            samples.append(request.samples)
            dense = request.dense or ()
            inputs.append(
                [*dense, *jagged_inputs(self._schema, request, rows, number)] if self.part.jagged else dense
            )
        if self._width:
            embeddings = _for_scores(batches[0]).for_scores(answers[0], asking)
        else:  # there is no batch of pooled features
            embeddings = np.empty((sum(samples), 0), self._dtype)
        return {
            number: {name: each for name, each in found.items() if name in validated.requests[number].outputs}
            for number, found in zip(asking, self.score(embeddings, inputs, samples), strict=True)
        }

    def score(
        self, embeddings: Embeddings, inputs: Sequence[Sequence[Array]], samples: Sequence[int]
    ) -> list[Outputs]:
        """Score R requests: by one call, or by one for each if the dense part mixes samples.

        Args:
            embeddings: of all requests, one after another, with all pooled features in the manifest's order; float32
                or float16 [B, D].
            inputs: of each request [R]: the dense inputs with a row for each sample, then the jagged inputs, in the
                manifest's order.
            samples: B_r of each request [R]. Their sum is B.

        Returns:
            The outputs of each request by name, [B_r, *shape]; [n_r, *shape] with a row for each id of a key.
        """
        if len(samples) == 1 and not self.part.mixes_samples:
            return [self._sliced(embeddings, inputs[0])]
        rows = _slices(samples)
        if self.part.mixes_samples:
            return [self._run(embeddings[each], own) for each, own in zip(rows, inputs, strict=True)]
        found = self._sliced(embeddings, [concatenate(each) for each in zip(*inputs, strict=True)])
        if not self._rows_at:
            return [{name: numbers[each] for name, numbers in found.items()} for each in rows]
        every = {key: _slices([len(own[at]) for own in inputs]) for key, at in self._rows_at.items()} | {None: rows}
        key_of = {each.name: each.key for each in self.part.outputs}
        return [
            {name: numbers[every[key_of[name]][number]] for name, numbers in found.items()}
            for number in range(len(samples))
        ]

    def _sliced(self, embeddings: Embeddings, inputs: Sequence[Array]) -> Outputs:
        """Score samples that do not meet; `SLICE` at a time where each has sequences."""
        samples, dense = len(embeddings), self._by_sample
        if samples <= SLICE or self._bounds is None:
            return self._run(embeddings, inputs)
        starts = [*range(0, samples, SLICE), samples]
        bounds = [starts] * dense + self._bounds(inputs[dense:], starts)
        slices = []
        for at, first in enumerate(starts[:-1]):
            own = [each[of[at] : of[at + 1]] for each, of in zip(inputs, bounds, strict=True)]
            slices.append(self._run(embeddings[first : starts[at + 1]], own))
        return {each.name: np.concatenate([found[each.name] for found in slices]) for each in self.part.outputs}

    def _run(self, embeddings: Embeddings, inputs: Sequence[Array]) -> Outputs:
        if not len(embeddings):
            return {each.name: np.empty((0, *each.shape), each.dtype.numpy) for each in self.part.outputs}
        with torch.inference_mode():
            # Rows may be columns of an answer, and what comes once is one row: a program may take views of neither.
            found = self._forward(*(torch.from_numpy(np.ascontiguousarray(each)) for each in (embeddings, *inputs)))
        return {each.name: numbers.numpy() for each, numbers in zip(self.part.outputs, found, strict=True)}


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Ranges of these sizes, one behind the other."""
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _rows_at(manifest: Manifest, part: DensePart) -> dict[str | None, int]:
    """For each key that an output has rows for the ids of: which of the inputs behind the embeddings has, too."""
    keys = {each.name: each.key for each in manifest.features}
    found = {
        part.key_of(each, keys): at for at, each in enumerate(part.jagged) if each.kind is not JaggedKind.LENGTHS
    }
    first = len(part.by_sample)
    return {each.key: first + found[each.key] for each in part.outputs if each.key is not None}


def _warn_of_read_only() -> None:
    """Have torch warn now that it has no read-only tensors, unseen: it does so once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.broadcast_to(np.float32(0), 1))


def _for_scores(batch: Batch) -> PooledBatch | CombinedBatch:
    """The first batch of requests for scores, which has their pooled features."""
    assert isinstance(batch, PooledBatch | CombinedBatch)  # noqa: S101  merge_all makes it first
    return batch
