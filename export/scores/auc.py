"""The area under the ROC curve (AUC) of scores, on samples with labels."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from export.batchability.differences import Numbers
from export.capture.graph_inputs import DenseInputs
from export.errors import ModelError, last_line
from export.scores.dense_part import CompiledDensePart
from export.scores.labelled_requests import LabelledRequest, Labels, outputs_with_labels
from export.scores.probe_inputs import request_inputs
from serving.bundle.scores import DenseInput, DensePart, LabelledAuc, ScoreOutput
from serving.engine import Engine
from serving.errors import ConfigurationError, InvalidRequest
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from serving.requests.layout import lengths_by_key


def with_labelled_auc(
    directory: Path, scored: CompiledDensePart, part: DensePart, requests: Sequence[LabelledRequest]
) -> DensePart:
    """A dense part with the AUC of its outputs: as served, and of the trained model if it can be run.

    An output with several numbers for a sample has no AUC. Nor has an output without labels.

    Args:
        directory: of the bundle, published or not. It has a manifest.
        scored: the compiled dense part.
        part: the dense part for its manifest.
        requests: the samples; at least one request.

    Raises:
        ConfigurationError: a request cannot be answered; labels are missing, or all the same; or no output has one
            number for each sample.
        ModelError: a score is not a number.
    """
    engine = Engine.open(directory)
    labelled = outputs_with_labels(requests, [output.name for output in part.outputs])
    names = [output.name for output in part.outputs if output.name in labelled and int(np.prod(output.shape)) == 1]
    if not names:
        raise ConfigurationError(
            "labelled (--labelled): expected labels for an output with one number for each sample, the model has "
            + ", ".join(f"{output.name!r} {list(output.shape)}" for output in part.outputs)
        )
    labels: dict[str, list[Labels]] = {name: [] for name in names}
    served: dict[str, list[Numbers]] = {name: [] for name in names}
    trained: dict[str, list[Numbers]] = {name: [] for name in names}
    for request in requests:
        served_scores = _served_scores(engine, request)
        for name in names:
            labels[name].append(request.labels_of(name, len(served_scores[name])))
            served[name].append(served_scores[name].reshape(-1))
        if scored.eager_scores is not None:
            trained_scores = _trained_scores(engine, scored.eager_scores, scored.part.inputs, request)
            for name in names:
                trained[name].append(trained_scores[name].reshape(-1))
    aucs = {name: _labelled_auc(name, labels[name], served[name], trained[name]) for name in names}
    return msgspec.structs.replace(
        part, outputs=tuple(_with_auc(output, aucs.get(output.name)) for output in part.outputs)
    )


def auc_of(scores: Numbers, labels: Labels) -> float:
    """How often a sample labelled 1 has a higher score than one labelled 0. Equal scores count half.

    Computed from the sum of ranks: the Wilcoxon statistic is the AUC (J. A. Hanley and B. J. McNeil, Radiology 143,
    1982).

    Args:
        scores: [B], without NaN.
        labels: bool [B], with both values.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # equal scores share their mean rank
    ones = int(labels.sum())
    return float((ranks[labels].sum() - ones * (ones + 1) / 2) / (ones * (labels.size - ones)))


def _served_scores(engine: Engine, request: LabelledRequest) -> Mapping[str, Numbers]:
    try:
        return engine.score(request.features, request.dense)
    except InvalidRequest as error:
        raise ConfigurationError(f"{request.where}: {error}") from error


def _trained_scores(
    engine: Engine,
    eager_scores: Callable[[DenseInputs], Mapping[str, Numbers]],
    dense_inputs: Sequence[DenseInput],
    request: LabelledRequest,
) -> Mapping[str, Numbers]:
    """What the trained model answers to a request that the engine answered."""
    manifest = engine.bundle.manifest
    ids = encode({key: request.features[key] for key in manifest.keys}, manifest.weighted_keys)
    dense = encode_dense(dense_inputs, request.dense, lengths_by_key(ids, [*manifest.keys]))
    try:
        return eager_scores(request_inputs(manifest, dense_inputs, ids, dense))
    except Exception as error:  # the model's code may raise anything, for ids outside of a table for example
        raise ConfigurationError(
            f"{request.where}: the trained model cannot answer: {last_line(error)}: give ids of its tables; or "
            "--trained-memory 0 beside a checkpoint, and have the AUC of what serves alone"
        ) from error


def _labelled_auc(
    name: str, labels: Sequence[Labels], served: Sequence[Numbers], trained: Sequence[Numbers]
) -> LabelledAuc:
    """The AUC of an output. `trained`: empty if the trained model cannot be run."""
    all_labels = np.concatenate(labels)
    if all_labels.all() or not all_labels.any():
        raise ConfigurationError(f"labelled (--labelled): output {name!r}: expected labels 0 and 1, all are the same")
    served_scores = np.concatenate(served)
    trained_scores = np.concatenate(trained) if trained else None
    for scores in (served_scores, trained_scores):
        if scores is not None and np.isnan(scores).any():
            raise ModelError(
                f"labelled (--labelled): output {name!r}: a sample's score is not a number: give labels by output, "
                "without it"
            )
    return LabelledAuc(
        all_labels.size,
        auc_of(served_scores, all_labels),
        None if trained_scores is None else auc_of(trained_scores, all_labels),
    )


def _with_auc(output: ScoreOutput, auc: LabelledAuc | None) -> ScoreOutput:
    return msgspec.structs.replace(output, parity=msgspec.structs.replace(output.parity, auc=auc))
