"""Requests to send, serialized beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from serving.client import ModelInfo
from serving.client.message import infer_request
from serving.errors import ConfigurationError, InvalidRequest
from serving.request.captured import PassedOver, read_captured
from serving.request.once import once_of, samples_of
from serving.request.tensors import LOOKED_UP, Lengths, Tensors


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent.

    Attributes:
        tensors: its ids and lengths, and its dense inputs.
        message: the ModelInferRequest of these, serialized.
        samples: how many it has.
    """

    tensors: Tensors
    message: bytes
    samples: int


def prepare(model: str, requests: Sequence[Tensors], info: ModelInfo) -> list[Prepared]:
    """Serialize `requests` for a served model."""
    prepared = []
    for tensors in requests:
        message = infer_request(model, tensors, info).SerializeToString()
        prepared.append(Prepared(tensors, message, _samples(tensors, info)))
    return prepared


def captured_requests(path: Path, info: ModelInfo, passed_over: PassedOver) -> tuple[list[Tensors], int]:
    """The requests of a captured file.

    A captured request has no weights. For a weighted model each id gets a weight of 1.

    Args:
        path: the file.
        info: the model that is to answer them.
        passed_over: counts lines that are no captured requests.

    Returns:
        The requests, and how many were left out: their lengths do not fit their features and ids, or the model does
        not have these dense inputs and outputs.

    Raises:
        ConfigurationError: no request can be sent.
    """
    captured = [each.tensors for each in read_captured(path, passed_over, follow=True)]
    requests = [
        replace(each, weights=np.ones(each.values.size, np.float32) if info.weighted else None)
        for each in captured
        if _adds_up(each, info) and _is_known(each, info)
    ]
    if not requests:
        raise ConfigurationError(f"{path}: expected requests, found none that can be sent")
    return requests, len(captured) - len(requests)


def _names(tensors: Tensors, info: ModelInfo) -> Sequence[str]:
    """The keys, or tables, that a request has lengths for."""
    if tensors.tables is not None:
        return tensors.tables
    return list(info.keys) if tensors.features is None else tensors.features


def _samples(tensors: Tensors, info: ModelInfo) -> int:
    """The samples of a request.

    Raises:
        InvalidRequest: its lengths do not fit what it names.
    """
    names = _names(tensors, info)
    return samples_of(tensors, names, once_of(names, [each.name for each in info.dense], tensors.once))


def _adds_up(tensors: Tensors, info: ModelInfo) -> bool:
    names = _names(tensors, info)
    known = info.keys.keys() if tensors.tables is None else info.tables.keys()
    lengths: Lengths = tensors.lengths  # type: ignore[assignment]
    if not names or not known >= set(names):
        return False
    try:
        _samples(tensors, info)
    except InvalidRequest:
        return False
    return not (lengths < 0).any() and int(lengths.sum(dtype=np.int64)) == tensors.values.size


def _is_known(tensors: Tensors, info: ModelInfo) -> bool:
    """Whether the model has the dense inputs and outputs of a request."""
    dense, outputs = {each.name for each in info.dense}, {*LOOKED_UP, *info.scores}
    return dense >= tensors.dense.keys() and outputs >= set(tensors.outputs)
