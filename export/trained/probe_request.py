"""A probe: a seeded request for all keys of a bundle, and the same request as a KeyedJaggedTensor."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from export.trained.eval_mode import quiet
from serving.bundle.manifest import Manifest
from serving.bundle.tables import ANY_INT64
from serving.requests.types import Ids, Tensors

_SEED = 20_451


_SAMPLES = 64


_LONGEST_BAG = 100


_LEAST, _MOST = -(2**63), 2**63 - 1


_EXTREMES = (0, _LEAST, _MOST, -1, 2**31, -(2**40))


def make_probe(
    manifest: Manifest, known: Mapping[str, Ids], counts: Mapping[str, int] = MappingProxyType({})
) -> Tensors:
    """A seeded request: for each key bags of 0 to 8 ids, an empty one, and one of 100 with the first and last id.

    No bag is longer than its position weights. Of ids that are remapped, half are those that the map has; the others
    are random, and the least and the largest.

    Args:
        manifest: of the bundle.
        known: ids of each key with a map.
        counts: keys whose bags are all of one size.
    """
    random = np.random.default_rng(_SEED)
    rows = manifest.rows_of_keys
    lengths = random.integers(0, 9, (len(rows), _SAMPLES)).astype(np.int32)
    lengths[:, 0] = _LONGEST_BAG
    lengths[:, 1] = 0
    longest = manifest.longest_bags
    lengths = np.minimum(lengths, [[longest.get(key, _LONGEST_BAG)] for key in rows]).astype(np.int32)
    for number, key in enumerate(rows):
        lengths[number] = counts.get(key, lengths[number])
    columns = []
    for (key, height), bags in zip(rows.items(), lengths, strict=True):
        columns.append(_ids(random, height, known.get(key), bags.sum()))
    values = np.concatenate(columns)
    weights = random.normal(size=values.size).astype(np.float32) if manifest.weighted else None
    if weights is not None:
        weighted = manifest.weighted_keys
        weights[~np.repeat([key in weighted for key in rows], lengths.sum(axis=1))] = 1
    return Tensors(None, values, lengths.ravel(), weights)


def _ids(random: np.random.Generator, valid: int, known: Ids | None, count: int) -> Ids:
    """Ids of one key, int64 [count].

    Args:
        random: numbers.
        valid: how many ids are valid.
        known: those that the map has. None: there is no map.
        count: how many ids are made.
    """
    most = min(valid, _MOST + 1)
    extremes: tuple[int, ...] = (0, most - 1)
    ids = random.integers(0, most, count)
    if valid == ANY_INT64:  # a second draw, so that such probes stay what they were
        ids, extremes = random.integers(_LEAST, _MOST, count, np.int64, endpoint=True), _EXTREMES
    if known is not None and known.size:
        ids = np.where(random.random(count) < 0.5, random.choice(known, count), ids)
    ids[: len(extremes)] = extremes[:count]
    return ids


def kjt_of(manifest: Manifest, probe: Tensors, device: torch.device) -> KeyedJaggedTensor:
    """A copy of the probe, which a module may write to."""
    with quiet():  # torch.fx warns of its own wrapper of this class
        return KeyedJaggedTensor(
            keys=list(manifest.keys),
            values=torch.tensor(probe.values),
            lengths=torch.tensor(probe.lengths),
            weights=None if probe.weights is None else torch.tensor(probe.weights),
        ).to(device)
