"""How many ids bags have on average, measured in captured requests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.bundle.tables import Feature
from serving.errors import ConfigurationError
from serving.request.captured import CapturedRequest, read_captured

# The average of a feature that no captured request asks for.
_UNKNOWN = 1.0


def captured_pooling(path: Path, features: Sequence[Feature]) -> dict[str, float]:
    """The average number of ids in a bag of each feature, over the samples of the requests that ask for it.

    A request that the model cannot answer is left out: refused requests are captured too. So is one for rows.

    Args:
        path: a file that serving captured.
        features: of the model.

    Returns:
        By the feature's name; 1 for a feature that no request asks for.

    Raises:
        ConfigurationError: the file cannot be read, or no request in it is one to this model.
    """
    keys = list(dict.fromkeys(feature.key for feature in features))
    ids, bags = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
    requests = 0
    for request in read_captured(path, follow=True):
        requests += 1
        asked = keys if request.features is None else request.features
        lengths = _lengths(request, len(asked))
        if lengths is None or request.tables is not None or not set(asked) <= ids.keys():
            continue
        for key, found in zip(asked, lengths, strict=True):
            ids[key] += int(found.sum())
            bags[key] += found.size
    if not any(bags.values()):
        raise ConfigurationError(
            f"traffic: {path}: expected requests for the keys {', '.join(keys)}, found none among {requests} requests"
        )
    average = {key: ids[key] / bags[key] if bags[key] else _UNKNOWN for key in keys}
    return {feature.name: average[feature.key] for feature in features}


def _lengths(request: CapturedRequest, keys: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]] | None:
    """The bag sizes of a request for so many keys, int32 [F, B]; None where they are wrong."""
    lengths = np.array(request.lengths, np.int32)
    fits = keys and lengths.size % keys == 0 and (lengths >= 0).all() and int(lengths.sum()) == len(request.values)
    return lengths.reshape(keys, -1) if fits else None
