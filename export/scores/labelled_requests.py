"""Requests for scores with the labels of their samples, from a file of JSON lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import ConfigurationError
from serving.files import open_file

Labels = npt.NDArray[np.bool_]
_LINE = (
    '{"features": {"feature": [[id, ...], ...], ...}, "dense": {"input": [[number, ...], ...]}, "label": [0, 1, ...]}'
)


@dataclass(frozen=True, slots=True)
class LabelledRequest:
    """A request for scores, with the labels of its samples.

    Attributes:
        where: its file and line.
        features: ids by feature, as `Engine.score` takes them.
        dense: dense inputs, as `Engine.score` takes them.
        label: 0 or 1 for each sample, or such a list for each output. It was not checked.
    """

    where: str
    features: Any
    dense: Any
    label: Any

    def labels_of(self, output: str, samples: int) -> Labels:
        """The labels for an output, bool [B].

        Raises:
            ConfigurationError: the request has no labels for it, or other than 0 or 1 for each of the `samples`.
        """
        labels = self.label.get(output) if isinstance(self.label, Mapping) else self.label
        if not isinstance(labels, list) or len(labels) != samples or not all(label in (0, 1) for label in labels):
            raise ConfigurationError(
                f"{self.where}: label: expected 0 or 1 for each of {samples} samples, for output {output!r}: {_LINE}"
            )
        return np.array(labels, np.bool_)

    def labelled_outputs(self, outputs: Sequence[str]) -> Sequence[str]:
        """The outputs that the request has labels for. A list of labels is for all `outputs`."""
        return [*self.label] if isinstance(self.label, Mapping) else outputs


def read_labelled(path: Path) -> list[LabelledRequest]:
    """Read a file of JSON lines: those of `tbe-serve score`, each with a `label`. Blank lines are skipped.

    Raises:
        ConfigurationError: the file cannot be read, has no requests, or a line is not a request.
    """
    try:
        with open_file(path, follow=True) as file:
            requests = [
                _parse(f"labelled (--labelled) {path}: line {number}", line)
                for number, line in enumerate(file, 1)
                if line.strip()
            ]
    except OSError as error:
        raise ConfigurationError(f"labelled (--labelled) {path}: cannot be read: {error.strerror}") from error
    if not requests:
        raise ConfigurationError(f"labelled (--labelled) {path}: expected lines such as {_LINE}, got none")
    return requests


def outputs_with_labels(requests: Sequence[LabelledRequest], outputs: Sequence[str]) -> Sequence[str]:
    """The outputs that all requests have labels for.

    Raises:
        ConfigurationError: a request has labels for an unknown output, or for other outputs than the first request.
    """
    first = requests[0].labelled_outputs(outputs)
    for request in requests:
        labelled = request.labelled_outputs(outputs)
        if unknown := [name for name in labelled if name not in outputs]:
            one_of = ", ".join(map(repr, outputs))
            raise ConfigurationError(f"{request.where}: label {unknown[0]!r}: expected one of the outputs {one_of}")
        if set(labelled) != set(first):
            expected = ", ".join(map(repr, first))
            raise ConfigurationError(f"{request.where}: label: expected labels for {expected}, as the first line has")
    return first


def _parse(where: str, line: bytes) -> LabelledRequest:
    try:
        request: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: expected JSON: {error}") from error
    if not isinstance(request, dict) or not (
        {"features", "label"} <= request.keys() <= {"features", "dense", "label"}
    ):
        raise ConfigurationError(f"{where}: expected {_LINE}")
    return LabelledRequest(where, request["features"], request.get("dense", {}), request["label"])
