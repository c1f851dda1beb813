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
    manifest: Manifest, mapped_ids: Mapping[str, Ids], counts: Mapping[str, int] = MappingProxyType({})
) -> Tensors:
    """A seeded request: for each key bags of 0 to 8 ids, an empty bag, and a bag of 100 with the first and last id.

    No bag is longer than the position weights of its key. For a key with an id map, half of the ids are in the map;
    the others are random, or extremes of int64.

    Args:
        manifest: of the bundle.
        mapped_ids: the ids in the map of each key that has one.
        counts: the ids of every bag, for keys whose bags have one size.
    """
    random = np.random.default_rng(_SEED)
    rows = manifest.rows_of_keys
    lengths = random.integers(0, 9, (len(rows), _SAMPLES)).astype(np.int32)
    lengths[:, 0] = _LONGEST_BAG
    lengths[:, 1] = 0
    longest = manifest.longest_bags
    lengths = np.minimum(lengths, [[longest.get(key, _LONGEST_BAG)] for key in rows]).astype(np.int32)
    for index, key in enumerate(rows):
        lengths[index] = counts.get(key, lengths[index])
    values = np.concatenate(
        [
            _ids(random, row_count, mapped_ids.get(key), key_lengths.sum())
            for (key, row_count), key_lengths in zip(rows.items(), lengths, strict=True)
        ]
    )
    weights = random.normal(size=values.size).astype(np.float32) if manifest.weighted else None
    if weights is not None:
        weighted = manifest.weighted_keys
        weights[~np.repeat([key in weighted for key in rows], lengths.sum(axis=1))] = 1
    return Tensors(None, values, lengths.ravel(), weights)


def _ids(random: np.random.Generator, row_count: int, mapped_ids: Ids | None, count: int) -> Ids:
    """Ids of one key, int64 [count].

    Args:
        random: the generator.
        row_count: valid ids are in [0, row_count).
        mapped_ids: the ids in the map of the key; None if it has no map.
        count: the number of ids.
    """
    limit = min(row_count, _MOST + 1)
    extremes: tuple[int, ...] = (0, limit - 1)
    ids = random.integers(0, limit, count)
    if row_count == ANY_INT64:  # a second draw, so that probes of other keys do not change
        ids, extremes = random.integers(_LEAST, _MOST, count, np.int64, endpoint=True), _EXTREMES
    if mapped_ids is not None and mapped_ids.size:
        ids = np.where(random.random(count) < 0.5, random.choice(mapped_ids, count), ids)
    ids[: len(extremes)] = extremes[:count]
    return ids


def kjt_of(manifest: Manifest, probe: Tensors, device: torch.device) -> KeyedJaggedTensor:
    """The probe as a KJT of new tensors, which a module may write to."""
    with quiet():  # torch.fx warns of its own wrapper of this class
        return KeyedJaggedTensor(
            keys=list(manifest.keys),
            values=torch.tensor(probe.values),
            lengths=torch.tensor(probe.lengths),
            weights=None if probe.weights is None else torch.tensor(probe.weights),
        ).to(device)
