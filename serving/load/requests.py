"""Requests to send, made beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.bundle import Bundle
from serving.capture import read_captured
from serving.client import ModelInfo
from serving.client.exchange import infer_request
from serving.errors import InvalidRequest
from serving.kjt import Lengths, Tensors
from serving.load.ids import Distribution

# Different requests of one size: enough that no cache learns them by heart, few enough to be made in a moment.
_COUNT = 64
_IDS_IN_ALL = 1 << 22


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
        features = len(info.dims if tensors.features is None else tensors.features)
        message = infer_request(model, tensors, info).SerializeToString()
        prepared.append(Prepared(tensors, message, tensors.lengths.size // features))
    return prepared


def random_requests(
    bundle: Bundle,
    samples: int,
    ids: Distribution,
    pooling_factors: Mapping[str, float],
    seed: int = 0,
) -> list[Tensors]:
    """Requests over all features of `bundle`.

    Args:
        samples: of each request.
        ids: how often each id is asked for.
        pooling_factors: ids in a bag, by feature; bags of 2.3 have 2 or 3, 2.3 on average.
    """
    random = np.random.default_rng(seed)
    manifest = bundle.manifest
    rows = [table.rows for table in manifest.feature_tables]
    factors = np.array([pooling_factors[feature.name] for feature in manifest.features])
    expected = max(1, int(factors.sum() * samples))
    requests = []
    for _ in range(min(_COUNT, max(4, _IDS_IN_ALL // expected))):
        lengths = np.floor(factors[:, np.newaxis] + random.random((factors.size, samples))).astype(np.int32)
        values = np.concatenate(
            [ids.draw(random, height, bags.sum()) for height, bags in zip(rows, lengths, strict=True)]
        )
        requests.append(Tensors(None, values, lengths.ravel(), _ones(values.size) if manifest.weighted else None))
    return requests


def captured_requests(path: Path, info: ModelInfo) -> tuple[list[Tensors], int]:
    """The requests of a captured file, with a weight of 1 for each id of a weighted model, which captures leave out.

    Returns:
        The requests, and how many were left out: their lengths are not those of their features and ids.

    Raises:
        InvalidRequest: none can be sent.
    """
    captured = [each.tensors for each in read_captured(path)]
    requests = [
        Tensors(each.features, each.values, each.lengths, _ones(each.values.size) if info.weighted else None)
        for each in captured
        if _adds_up(each, info)
    ]
    if not requests:
        raise InvalidRequest(f"{path}: expected requests, found none that can be sent")
    return requests, len(captured) - len(requests)


def _adds_up(tensors: Tensors, info: ModelInfo) -> bool:
    names = list(info.dims) if tensors.features is None else list(tensors.features)
    lengths: Lengths = tensors.lengths  # type: ignore[assignment]
    return (
        bool(names)
        and info.dims.keys() >= set(names)
        and not lengths.size % len(names)
        and not (lengths < 0).any()
        and int(lengths.sum(dtype=np.int64)) == tensors.values.size
    )


def _ones(count: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.ones(count, np.float32)
