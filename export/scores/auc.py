"""The area under the ROC curve (AUC) of scores, on samples with labels."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from export.capture.bags import bags_of
from export.capture.graph_inputs import DenseInputs
from export.errors import ModelError, last_line
from export.scores.dense_part import CompiledDensePart
from export.scores.probe_inputs import with_dense
from export.trained.probe import kjt_of
from serving.bundle.scores import DensePart, LabelledAuc, ScoreOutput
from serving.engine import Engine
from serving.errors import ConfigurationError, InvalidRequest
from serving.files import open_file
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from serving.requests.layout import lengths_by_key

Labels = npt.NDArray[np.bool_]
_LINE = (
    '{"features": {"feature": [[id, ...], ...], ...}, "dense": {"input": [[number, ...], ...]}, "label": [0, 1, ...]}'
)


@dataclass(frozen=True, slots=True)
class LabelledRequest:
    """A request for scores, with the labels of its samples.

    Attributes:
        where: the file and line that it stands in.
        features: ids by feature, as `Engine.score` takes them.
        dense: dense inputs likewise.
        label: 0 or 1 for each sample; or such lists by output. As it was written.
    """

    where: str
    features: Any
    dense: Any
    label: Any

    def labels_of(self, output: str, samples: int) -> Labels:
        """The labels for an output, bool [B].

        Raises:
            ConfigurationError: there is none for it, or not a 0 or 1 for each of the `samples`.
        """
        given = self.label.get(output) if isinstance(self.label, Mapping) else self.label
        if not isinstance(given, list) or len(given) != samples or not all(each in (0, 1) for each in given):
            raise ConfigurationError(
                f"{self.where}: label: expected 0 or 1 for each of {samples} samples, for output {output!r}: {_LINE}"
            )
        return np.array(given, np.bool_)


def read_labelled(path: Path) -> list[LabelledRequest]:
    """Read a file of JSON lines, as `tbe-serve score` takes them, each with a `label`. Blank lines are passed over.

    Raises:
        ConfigurationError: it cannot be read, has no line, or a line is something else.
    """
    try:
        with open_file(path, follow=True) as file:
            requests = [
                _request(f"labelled (--labelled) {path}: line {n}", line)
                for n, line in enumerate(file, 1)
                if line.strip()
            ]
    except OSError as error:
        raise ConfigurationError(f"labelled (--labelled) {path}: cannot be read: {error.strerror}") from error
    if not requests:
        raise ConfigurationError(f"labelled (--labelled) {path}: expected lines such as {_LINE}, got none")
    return requests


def with_labelled_auc(
    directory: Path, scored: CompiledDensePart, part: DensePart, requests: Sequence[LabelledRequest]
) -> DensePart:
    """A dense part with the AUC of its outputs: served, and of the trained model where that can be run.

    Outputs with several numbers for a sample have none. Nor has an output without labels, where they are by output.

    Args:
        directory: of the bundle, published or not. It has a manifest.
        scored: what its dense part was made of.
        part: the dense part, for its manifest.
        requests: the samples; at least one request.

    Raises:
        ConfigurationError: a line cannot be answered; labels are missing, or all the same; or no output has one
            number for each sample.
        ModelError: a score is no number.
    """
    engine = Engine.open(directory)
    labelled = _labelled(requests, [each.name for each in part.outputs])
    outputs = [each.name for each in part.outputs if each.name in labelled and int(np.prod(each.shape)) == 1]
    if not outputs:
        raise ConfigurationError(
            "labelled (--labelled): expected labels for an output with one number for each sample, the model has "
            + ", ".join(f"{each.name!r} {list(each.shape)}" for each in part.outputs)
        )
    labels: dict[str, list[Labels]] = {name: [] for name in outputs}
    served: dict[str, list[Any]] = {name: [] for name in outputs}
    trained: dict[str, list[Any]] = {name: [] for name in outputs}
    for request in requests:
        found = _served(engine, request)
        own = None if scored.eager_scores is None else _trained(engine, scored, request)
        for name in outputs:
            labels[name].append(request.labels_of(name, len(found[name])))
            served[name].append(found[name].reshape(-1))
            if own is not None:
                trained[name].append(own[name].reshape(-1))
    found_auc = {
        name: _measured(name, np.concatenate(labels[name]), np.concatenate(served[name]), trained[name])
        for name in outputs
    }
    return msgspec.structs.replace(
        part, outputs=tuple(_with(each, found_auc.get(each.name)) for each in part.outputs)
    )


def auc_of(scores: npt.NDArray[Any], labels: Labels) -> float:
    """How often a sample labelled 1 has a higher score than one labelled 0; equal scores count half.

    From the sum of ranks (J. A. Hanley and B. J. McNeil, Radiology 143, 1982: the Wilcoxon statistic is the AUC).

    Args:
        scores: [B], no NaN.
        labels: bool [B], some of each.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # of equal scores their mean
    ones = int(labels.sum())
    return float((ranks[labels].sum() - ones * (ones + 1) / 2) / (ones * (labels.size - ones)))


def _request(where: str, line: bytes) -> LabelledRequest:
    try:
        found: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: expected JSON: {error}") from error
    if not isinstance(found, dict) or not {"features", "label"} <= found.keys() <= {"features", "dense", "label"}:
        raise ConfigurationError(f"{where}: expected {_LINE}")
    return LabelledRequest(where, found["features"], found.get("dense", {}), found["label"])


def _labelled(requests: Sequence[LabelledRequest], outputs: Sequence[str]) -> Sequence[str]:
    """The outputs that all lines have labels for: an AUC is one of all samples.

    Raises:
        ConfigurationError: a line, which is named, has labels for an unknown output, or others than the first.
    """
    first = _labelled_outputs(requests[0], outputs)
    for request in requests:
        named = _labelled_outputs(request, outputs)
        if unknown := [name for name in named if name not in outputs]:
            one_of = ", ".join(map(repr, outputs))
            raise ConfigurationError(f"{request.where}: label {unknown[0]!r}: expected one of the outputs {one_of}")
        if set(named) != set(first):
            expected = ", ".join(map(repr, first))
            raise ConfigurationError(f"{request.where}: label: expected labels for {expected}, as the first line has")
    return first


def _labelled_outputs(request: LabelledRequest, outputs: Sequence[str]) -> Sequence[str]:
    """The outputs that a line has labels for; a list is for all."""
    return [*request.label] if isinstance(request.label, Mapping) else outputs


def _served(engine: Engine, request: LabelledRequest) -> Mapping[str, npt.NDArray[Any]]:
    try:
        return engine.score(request.features, request.dense)
    except InvalidRequest as error:
        raise ConfigurationError(f"{request.where}: {error}") from error


def _trained(engine: Engine, scored: CompiledDensePart, request: LabelledRequest) -> Mapping[str, npt.NDArray[Any]]:
    """What the trained model answers to a request that the engine answers, too."""
    assert scored.eager_scores is not None  # noqa: S101  it was asked
    manifest = engine.bundle.manifest
    ids = encode({key: request.features[key] for key in manifest.keys}, manifest.weighted_keys)
    dense = encode_dense(scored.part.inputs, request.dense, lengths_by_key(ids, [*manifest.keys]))
    bags = bags_of(kjt_of(manifest, ids, torch.device("cpu")))
    samples = ids.lengths.size // len(manifest.keys)
    arrays = {name: torch.from_numpy(each) for name, each in dense.items()}
    try:
        return scored.eager_scores(
            with_dense(DenseInputs(torch.empty(samples, 0), (), bags), scored.part.inputs, arrays)
        )
    except Exception as error:  # its code may raise anything: for ids outside of a table, for example
        raise ConfigurationError(
            f"{request.where}: the trained model cannot answer: {last_line(error)}: give ids of its tables; or "
            "--trained-memory 0 beside a checkpoint, and have the AUC of what serves alone"
        ) from error


def _measured(name: str, labels: Labels, served: npt.NDArray[Any], trained: Sequence[Any]) -> LabelledAuc:
    if labels.all() or not labels.any():
        raise ConfigurationError(f"labelled (--labelled): output {name!r}: expected labels 0 and 1, all are the same")
    own = np.concatenate(trained) if trained else None
    for scores in (served, own):
        if scores is not None and np.isnan(scores).any():
            raise ModelError(
                f"labelled (--labelled): output {name!r}: a sample's score is not a number: give labels by output, "
                "without it"
            )
    return LabelledAuc(len(labels), auc_of(served, labels), None if own is None else auc_of(own, labels))


def _with(output: ScoreOutput, auc: LabelledAuc | None) -> ScoreOutput:
    return msgspec.structs.replace(output, parity=msgspec.structs.replace(output.parity, auc=auc))
