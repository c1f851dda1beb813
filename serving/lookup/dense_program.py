"""The dense part of a bundle with scores: its second program, which takes looked-up embeddings."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch

from serving.bundle.load import Bundle
from serving.bundle.manifest import Manifest
from serving.bundle.scores import ITEMS_PROGRAM, USER_PROGRAM, DenseFile, DensePart, JaggedKind
from serving.errors import BundleError
from serving.lookup.dense_files import load_dense_part
from serving.lookup.user_side import UserSidePrograms
from serving.requests.batches import Batch, CombinedBatch, PooledBatch, unmerge_rows
from serving.requests.jagged_inputs import RowsOfAll, jagged_inputs, sample_bounds, zero_jagged
from serving.requests.offsets import concatenate
from serving.requests.schema import ScoringSchema
from serving.requests.types import Array, Embeddings, KjtRequest, Outputs, ValidatedRequests
from serving.torchscript import one_line

# Batch sizes of the calls during loading. TorchScript observes two calls, compiles at the third one, and again at the
# first call with another batch size. These calls take ten times as long as later ones.
_FIRST_CALLS = (1, 1, 1, 2, 2)
# Samples that are scored at once, so that intermediate results stay in the processor's caches
# (docs/decisions/0007-dense-part.md). A model with sequences pads them, so that its samples take more.
SLICE = 64
# Without sequences, for each thread of torch: threads share the samples of a layer, and have caches of their own. In
# one call, 4,096 samples of DLRM-v2 need 28 MB between layers, which malloc maps again for each tensor.
POOLED_SLICE = 512
# What these calls raise if a program does not fit its manifest.
_FAILURES = (RuntimeError, ValueError, MemoryError)


class DenseProgram:
    """The second program of a bundle.

    Args:
        bundle: the bundle.
        schema: the schema of its requests.
        file: a file with the dense part. None: the fastest one that this process can load.

    Attributes:
        part: its description in the manifest, without a user side whose programs this process cannot load.
        schema: the schema of its requests, with `part`.
        loaded: the file that it was loaded from, and the files that could not be loaded.

    Raises:
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """

    def __init__(self, bundle: Bundle, schema: ScoringSchema, file: DenseFile | None = None) -> None:
        part = schema.dense_part
        self.loaded = load_dense_part(bundle, part.files_by_speed if file is None else [file])
        self._user_side = None if part.user_side is None else self._open_user_side(bundle, part)
        if self._user_side is None and part.user_side is not None:
            part = msgspec.structs.replace(part, user_side=None)
            schema = replace(schema, dense_part=part)
        self.part, self.schema = part, schema
        path = bundle.path / self.loaded.file.name
        self._forward = self.loaded.forward
        self._dtype = bundle.manifest.output_dtype.numpy
        features = schema.all_features
        self._width = int(features.dims[~features.sequence].sum())
        self._bounds = sample_bounds(bundle.manifest, part)
        self._by_sample = len(part.by_sample)
        self._rows_at = _rows_at(bundle.manifest, part)
        self._names = [tensor.name for tensor in part.by_sample]
        self._shared = () if part.user_side is None else part.user_side.names
        _warn_of_read_only()
        for samples in _FIRST_CALLS:
            self._check_answers(path, samples, partial(self._first_call, bundle.manifest, samples, 1))
        if self._user_side is not None:
            path = bundle.path / ITEMS_PROGRAM
            for samples in _FIRST_CALLS:
                self._check_answers(path, samples, partial(self._first_call_of_user_side, bundle.manifest, samples))
        if part.jagged:
            # A model may fail without ids. Only requests without ids fail then.
            with suppress(*_FAILURES):
                self._first_call(bundle.manifest, 1, 0)

    def _check_answers(self, path: Path, samples: int, call: Callable[[], Outputs]) -> None:
        """Refuse a program that fails for samples with an id of each key, or whose answers are not the manifest's.

        Args:
            path: of its file.
            samples: that `call` scores.
            call: the first calls of the program.

        Raises:
            BundleError: it fails, or answers with other dtypes or shapes.
        """
        try:
            answers = [*call().values()]
        except _FAILURES as error:
            why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            raise BundleError(f"{path}: cannot score: {why}: export it again") from error
        expected = []
        for output in self.part.outputs:
            rows = samples * (1 if output.key is None else self.part.fixed_lengths.get(output.key, 1))
            expected.append((output.dtype.numpy, (rows, *output.shape)))
        if (actual := [(answer.dtype, answer.shape) for answer in answers]) != expected:
            what = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in actual)
            raise BundleError(f"{path}: answers {what}: was compiled for another manifest: export it again")

    def _first_call(self, manifest: Manifest, samples: int, ids: int) -> Outputs:
        """Score zeros: samples with `ids` ids of each key, or with the fixed number that the model takes."""
        return self._run(np.zeros((samples, self._width), self._dtype), self._zeros(manifest, samples, ids))

    def _open_user_side(self, bundle: Bundle, part: DensePart) -> UserSidePrograms | None:
        """The programs of the user side, or None if this process cannot load them."""
        try:
            return UserSidePrograms(bundle, part)
        except BundleError:
            raise
        except Exception as error:  # torch does not say of which types
            failure = f"{bundle.path / USER_PROGRAM}: torch {torch.__version__} cannot load it: {one_line(error)}"
            self.loaded = replace(self.loaded, failures=(*self.loaded.failures, failure))
            return None

    def _first_call_of_user_side(self, manifest: Manifest, samples: int) -> Outputs:
        """Score zeros by the programs of the user side: items with an id of each key."""
        assert self._user_side is not None  # noqa: S101
        of_user, of_items = self._zeros(manifest, 1, 1), self._zeros(manifest, samples, 1)
        inputs = [
            of_user[number] if number in self._user_side.of_user else array for number, array in enumerate(of_items)
        ]
        return self._user_side.score(np.zeros((samples, self._width), self._dtype), inputs)

    def _zeros(self, manifest: Manifest, samples: int, ids: int) -> list[Array]:
        dense = [np.zeros((samples, *tensor.shape), tensor.dtype.numpy) for tensor in self.part.by_sample]
        return [*dense, *zero_jagged(manifest, self.part, samples, ids)]

    def score_all(
        self, validated: ValidatedRequests, batches: Sequence[Batch], answers: Sequence[Embeddings]
    ) -> dict[int, Outputs]:
        """Score the requests for scores.

        Args:
            validated: the requests.
            batches: the batches that were looked up for them.
            answers: the ranks' answer to each batch, float32 or float16. Before scoring, the row of a shared feature
                is repeated for each sample of its request.

        Returns:
            The requested outputs by name, by the position of the request in `validated`: [B_r, …], or [n_r, …] with a
            row for each id of a key.
        """
        requests = validated.requests
        numbers = [number for number, request in enumerate(requests) if request.dense is not None]
        if not numbers:
            return {}
        rows = unmerge_rows(batches, answers) if self.part.jagged else {}
        scores: dict[int, Outputs] = {}
        for number in numbers:
            if self._user_side is not None and requests[number].is_user_side:
                embeddings = self._embeddings(batches, answers, requests, [number], repeated=False)
                inputs = self._inputs(requests[number], rows, number, repeated=False)
                scores[number] = self._user_side.score(embeddings, inputs)
        unscored = [number for number in numbers if number not in scores]
        if unscored:
            inputs_of_others = [self._inputs(requests[number], rows, number, repeated=True) for number in unscored]
            embeddings = self._embeddings(batches, answers, requests, unscored, repeated=True)
            samples = [requests[number].samples for number in unscored]
            scores |= zip(unscored, self.score(embeddings, inputs_of_others, samples), strict=True)
        return {
            number: {name: numbers for name, numbers in outputs.items() if name in requests[number].outputs}
            for number, outputs in scores.items()
        }

    def _inputs(self, request: KjtRequest, rows: RowsOfAll, number: int, *, repeated: bool) -> Sequence[Array]:
        """The dense and jagged inputs of a request. Shared inputs are repeated for each sample, or have one row."""
        dense = request.dense or ()
        if not repeated:
            dense = [
                array[:1] if name in self._shared else array for array, name in zip(dense, self._names, strict=True)
            ]
        if not self.part.jagged:
            return dense
        return [*dense, *jagged_inputs(self.schema, request, rows, number, repeated=repeated)]

    def _embeddings(
        self,
        batches: Sequence[Batch],
        answers: Sequence[Embeddings],
        requests: Sequence[KjtRequest],
        numbers: Sequence[int],
        *,
        repeated: bool,
    ) -> Embeddings:
        """The pooled embeddings of some requests, [B, D]."""
        if self._width:
            return _for_scores(batches[0]).for_scores(answers[0], numbers, repeated=repeated)
        # There is no batch of pooled features.
        return np.empty((sum(requests[number].samples for number in numbers), 0), self._dtype)

    def score(
        self, embeddings: Embeddings, inputs: Sequence[Sequence[Array]], samples: Sequence[int]
    ) -> list[Outputs]:
        """Score R requests: by one call, or by a call for each request if the dense part mixes samples.

        Args:
            embeddings: the embeddings of all requests, one after another, with all pooled features in the manifest's
                order; float32 or float16 [B, D].
            inputs: the inputs of each request [R]: the dense inputs with a row for each sample, then the jagged
                inputs, in the manifest's order.
            samples: the samples B_r of each request [R]. Their sum is B.

        Returns:
            The outputs of each request by name, [B_r, *shape]; [n_r, *shape] with a row for each id of a key.
        """
        if len(samples) == 1 and not self.part.mixes_samples:
            return [self._sliced(embeddings, inputs[0])]
        rows = _slices(samples)
        if self.part.mixes_samples:
            return [
                self._run(embeddings[rows_of_request], arrays)
                for rows_of_request, arrays in zip(rows, inputs, strict=True)
            ]
        merged = self._sliced(embeddings, [concatenate(arrays) for arrays in zip(*inputs, strict=True)])
        rows_by_key: dict[str | None, list[slice]] = {None: rows}
        for key, index in self._rows_at.items():
            rows_by_key[key] = _slices([len(arrays[index]) for arrays in inputs])
        return [
            {output.name: merged[output.name][rows_by_key[output.key][number]] for output in self.part.outputs}
            for number in range(len(samples))
        ]

    def _sliced(self, embeddings: Embeddings, inputs: Sequence[Array]) -> Outputs:
        """Score samples that are independent of each other, some at a time."""
        samples, dense_count = len(embeddings), self._by_sample
        is_cut = self._bounds is not None or not self.part.jagged
        most = SLICE if self.part.jagged else POOLED_SLICE * torch.get_num_threads()
        if samples <= most or not is_cut:
            return self._run(embeddings, inputs)
        starts = [*range(0, samples, most), samples]
        bounds: list[Sequence[int]] = [starts] * dense_count
        if self._bounds is not None:
            bounds += self._bounds(inputs[dense_count:], starts)
        slices = []
        for number, (first, last) in enumerate(pairwise(starts)):
            arrays = [array[ends[number] : ends[number + 1]] for array, ends in zip(inputs, bounds, strict=True)]
            slices.append(self._run(embeddings[first:last], arrays))
        return {
            output.name: np.concatenate([scores[output.name] for scores in slices]) for output in self.part.outputs
        }

    def _run(self, embeddings: Embeddings, inputs: Sequence[Array]) -> Outputs:
        outputs = self.part.outputs
        if not len(embeddings):
            return {output.name: np.empty((0, *output.shape), output.dtype.numpy) for output in outputs}
        with torch.inference_mode():
            # Rows may be columns of an answer, and a shared row may be broadcast. Programs must not get views of
            # either.
            arrays = (np.ascontiguousarray(array) for array in (embeddings, *inputs))
            scores = self._forward(*map(torch.from_numpy, arrays))
        return {output.name: tensor.numpy() for output, tensor in zip(outputs, scores, strict=True)}


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Adjacent ranges of these sizes."""
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _rows_at(manifest: Manifest, part: DensePart) -> dict[str | None, int]:
    """For each key whose ids an output has rows for, the index of an input that also has a row for each."""
    keys = manifest.key_of_feature
    indices = {
        part.key_of(jagged, keys): index
        for index, jagged in enumerate(part.jagged, start=len(part.by_sample))
        if jagged.kind is not JaggedKind.LENGTHS
    }
    return {output.key: indices[output.key] for output in part.outputs if output.key is not None}


def _warn_of_read_only() -> None:
    """Trigger and silence torch's warning about read-only tensors, which it prints once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.broadcast_to(np.float32(0), 1))


def _for_scores(batch: Batch) -> PooledBatch | CombinedBatch:
    """The first batch of requests for scores, which has their pooled features."""
    assert isinstance(batch, PooledBatch | CombinedBatch)  # noqa: S101  merge_all makes it first
    return batch
