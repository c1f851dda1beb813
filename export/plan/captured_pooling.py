"""The average number of ids in the bags of each feature, measured in requests that serving captured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.bundle.tables import Feature
from serving.errors import ConfigurationError, InvalidRequest
from serving.request.bags import lengths_by_key
from serving.request.captured import CapturedRequest, read_captured
from serving.request.tensors import Lengths

# The average of a feature that no captured request asks for.
_UNKNOWN = 1.0


def captured_pooling(path: Path, features: Sequence[Feature]) -> dict[str, float]:
    """The average number of ids in a bag of each feature, over the samples of the requests that ask for it.

    A request that the model cannot answer is left out: refused requests are captured too. So is one for rows. Ids
    that come once are divided by the samples that they count for: they are looked up once.

    Args:
        path: a file that serving captured.
        features: of the model.

    Returns:
        By the feature's name; 1 for a feature that no request asks for.

    Raises:
        ConfigurationError: the file cannot be read, or no line of it is a request to this model.
    """
    keys = list(dict.fromkeys(feature.key for feature in features))
    ids, bags = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
    requests = 0
    for request in read_captured(path, follow=True):
        requests += 1
        asked = keys if request.features is None else request.features
        lengths = _lengths(request, asked)
        if lengths is None or request.tables is not None or not set(asked) <= ids.keys():
            continue
        samples = max(found.size for found in lengths.values())
        for key, found in lengths.items():
            ids[key] += int(found.sum())
            bags[key] += samples
    if not any(bags.values()):
        raise ConfigurationError(
            f"traffic: {path}: expected requests for the keys {', '.join(keys)}, found none among {requests} requests"
        )
    average = {key: ids[key] / bags[key] if bags[key] else _UNKNOWN for key in keys}
    return {feature.name: average[feature.key] for feature in features}


def _lengths(request: CapturedRequest, keys: Sequence[str]) -> dict[str, Lengths] | None:
    """The bag sizes of a request by key, int32 [B] or [1]; None where they are wrong."""
    lengths = np.array(request.lengths, np.int32)
    if not keys or (lengths < 0).any() or int(lengths.sum()) != len(request.values):
        return None
    try:
        return lengths_by_key(request.tensors, keys)
    except InvalidRequest:
        return None
