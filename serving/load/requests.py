"""Requests to send, made beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.capture import read_captured
from serving.client import ModelInfo
from serving.client.exchange import infer_request
from serving.errors import InvalidRequest
from serving.kjt import Lengths, Tensors


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was made beforehand: its tensors, and the ModelInferRequest they make, serialized."""

    tensors: Tensors
    message: bytes
    samples: int


def prepare(model: str, requests: Sequence[Tensors], info: ModelInfo) -> list[Prepared]:
    """Serialize `requests`."""
    prepared = []
    for tensors in requests:
        features = len(info.keys if tensors.features is None else tensors.features)
        message = infer_request(model, tensors, info).SerializeToString()
        prepared.append(Prepared(tensors, message, tensors.lengths.size // features))
    return prepared


def captured_requests(path: Path, info: ModelInfo) -> tuple[list[Tensors], int]:
    """The requests of a captured file, with a weight of 1 for each id of a weighted model, which captures leave out.

    Returns:
        The requests, and how many were left out: their lengths are not those of their features and ids.

    Raises:
        InvalidRequest: none can be sent.
    """
    captured = [each.tensors for each in read_captured(path, follow=True)]
    requests = [
        Tensors(
            each.features, each.values, each.lengths, np.ones(each.values.size, np.float32) if info.weighted else None
        )
        for each in captured
        if _adds_up(each, info)
    ]
    if not requests:
        raise InvalidRequest(f"{path}: expected requests, found none that can be sent")
    return requests, len(captured) - len(requests)


def _adds_up(tensors: Tensors, info: ModelInfo) -> bool:
    names = list(info.keys) if tensors.features is None else list(tensors.features)
    lengths: Lengths = tensors.lengths  # type: ignore[assignment]
    return (
        bool(names)
        and info.keys.keys() >= set(names)
        and not lengths.size % len(names)
        and not (lengths < 0).any()
        and int(lengths.sum(dtype=np.int64)) == tensors.values.size
    )
