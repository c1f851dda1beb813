"""What both engines are: a loaded bundle, and what happens to a request before and after it is looked up."""

import os
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from serving.bundle.manifest import MANIFEST
from serving.bundle.opening import Bundle
from serving.bundle.use import hold
from serving.dense_part import DenseProgram
from serving.errors import InvalidRequest
from serving.ranks.answered import Answered, failed_of
from serving.ranks.here import Here
from serving.ranks.routed import Routed
from serving.ranks.weights import Weights
from serving.request import kjt
from serving.request.accept import accept
from serving.request.batches import outputs_of
from serving.request.dense import DenseFeatures, encode_dense
from serving.request.encoding import Features, decode, encode, encode_rows
from serving.request.id_maps import IdMaps
from serving.request.once import lengths_by_key
from serving.request.schema import Schema
from serving.request.sequence import Sequence as RowSequence
from serving.request.sequences import rows_of
from serving.request.tensors import Batch, Checked, Embeddings, Outputs, Tensors


class Loaded:
    """A bundle, its weights and its ranks: requests are checked and made batches, answers are cut.

    Attributes:
        bundle: the bundle.
        schema: the features that requests are checked against.
        weights: its files of weights.
        ranks: where partial sums come from.
    """

    def __init__(self, bundle: Bundle, weights: Weights, ranks: Here | Routed) -> None:
        self.bundle = bundle
        self.weights = weights
        self.ranks = ranks
        # Weights may be links into another bundle. `tbe-export prune` has to leave that one alone, too.
        linked = {(bundle.path / name).resolve().parent for name in bundle.manifest.mapped_files}
        for folder in {bundle.path, *(each for each in linked if (each / MANIFEST).exists())}:
            weakref.finalize(self, os.close, hold(folder))
        part = bundle.manifest.dense_part
        self._dense = None if part is None else DenseProgram(bundle, part)
        self.schema = Schema.of(bundle.manifest, IdMaps.of(bundle.path, bundle.manifest))
        self._weighted = bundle.manifest.weighted_keys

    def _encoded(self, features: Features, once: Collection[str]) -> Tensors:
        return encode(features, self._weighted, once)

    def _encoded_rows(self, table: str, ids: npt.ArrayLike) -> Tensors:
        return encode_rows(table, ids, weighted=self.schema.weighted)

    def _checked(self, tensors: Tensors) -> Checked:
        """One request, checked.

        Raises:
            InvalidRequest: naming the feature, what was expected and what came.
        """
        request = accept(self.schema, tensors)
        try:
            checked = kjt.check([request])
        except InvalidRequest:
            request, _ = kjt.apply_id_policies(request)
            checked = kjt.check([request])
        return checked

    def score_batch(self, batches: Sequence[Batch], answers: Sequence[Embeddings]) -> dict[int, Outputs]:
        """The scores of those requests that ask for some, made of the first batch; see `DenseProgram.score_batch`."""
        return self._dense.score_batch(batches[0], answers[0]) if self._dense is not None and batches else {}

    def _for_scores(self, features: Features, dense: DenseFeatures, once: Collection[str]) -> Tensors:
        part = self.bundle.manifest.dense_part
        if part is None:
            raise InvalidRequest(f"{self.bundle.path}: has no scores: export the model with --scores")
        names = [each.name for each in part.outputs]
        return replace(self._encoded(features, once), outputs=names, dense=encode_dense(dense))

    def _outputs(self, checked: Checked, batches: Sequence[Batch], answered: Sequence[Answered]) -> Outputs:
        """The outputs of one request."""
        answers = _only(answered)
        (outputs,) = outputs_of(checked, batches, answers)
        return outputs if self._dense is None else {**outputs, **self.score_batch(batches, answers).get(0, {})}

    def _by_feature(
        self, tensors: Tensors, checked: Checked, batches: Sequence[Batch], answered: Sequence[Answered]
    ) -> dict[str, Any]:
        """The answer to one request, by feature: nothing is copied."""
        answers = _only(answered)
        (request,) = checked.requests
        selection = request.selection
        found: dict[str, Any] = {}
        for batch, answer in zip(batches, answers, strict=True):
            if batch.row_bounds is None:
                found |= decode(answer, dict(zip(batch.selection.names, batch.selection.dims.tolist(), strict=True)))
        rows = rows_of(batches, answers)
        lengths = lengths_by_key(tensors, selection.keys) if rows else {}
        for name, key, position in zip(selection.names, selection.key_of, selection.positions.tolist(), strict=True):
            if (0, position) in rows:
                found[name] = RowSequence(rows[0, position], lengths[key])
        return {name: found[name] for name in selection.names}


def _only(answered: Sequence[Answered]) -> list[Embeddings]:
    """The answers to the batches of one request."""
    for error in failed_of(answered).values():
        raise error
    return [each.embeddings for each in answered]
