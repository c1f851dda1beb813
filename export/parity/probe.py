"""One request to every table, and its answer by a program here."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from serving.bundle.manifest import Manifest
from serving.ranks.here import arguments
from serving.request import kjt
from serving.request.accept import accept
from serving.request.batches import batches_of, outputs_of
from serving.request.id_maps import IdMaps
from serving.request.schema import Schema
from serving.request.tensors import Ids, Outputs, Tensors

_SEED = 20_451
_SAMPLES = 64
_LONGEST_BAG = 100
_LEAST, _MOST = -(2**63), 2**63 - 1
_EXTREMES = (0, _LEAST, _MOST, -1, 2**31, -(2**40))

Arguments = tuple[Tensor, Tensor, Tensor | None]


def make_probe(manifest: Manifest, known: Mapping[str, Ids]) -> Tensors:
    """A seeded request: for each key bags of 0 to 8 ids, an empty one, and one of 100 with the first and last id.

    No bag is longer than its position weights. Where any int64 is an id, half of the ids are those that the map has;
    the others are random, and the least and the largest.

    Args:
        manifest: of the bundle.
        known: ids of each key with a map.
    """
    random = np.random.default_rng(_SEED)
    rows = manifest.rows_of_keys
    lengths = random.integers(0, 9, (len(rows), _SAMPLES)).astype(np.int32)
    lengths[:, 0] = _LONGEST_BAG
    lengths[:, 1] = 0
    longest = manifest.longest_bags
    lengths = np.minimum(lengths, [[longest.get(key, _LONGEST_BAG)] for key in rows]).astype(np.int32)
    columns = []
    for (key, height), bags in zip(rows.items(), lengths, strict=True):
        ids = random.integers(0, height, bags.sum())
        ids[:2] = (0, height - 1)[: ids.size]
        columns.append(_raw(random, known[key], ids.size) if key in known else ids)
    values = np.concatenate(columns)
    weights = random.normal(size=values.size).astype(np.float32) if manifest.weighted else None
    if weights is not None:
        weighted = manifest.weighted_keys
        weights[~np.repeat([key in weighted for key in rows], lengths.sum(axis=1))] = 1
    return Tensors(None, values, lengths.ravel(), weights)


def _raw(random: np.random.Generator, known: Ids, count: int) -> Ids:
    """Ids of a table with a map, int64 [count]."""
    ids = random.integers(_LEAST, _MOST, count, np.int64, endpoint=True)
    if known.size:
        ids = np.where(random.random(count) < 0.5, random.choice(known, count), ids)
    ids[: len(_EXTREMES)] = _EXTREMES[:count]
    return ids


def as_arguments(manifest: Manifest, request: Tensors, maps: IdMaps | None) -> Arguments:
    """A request for all keys of pooled features, as programs take it.

    Args:
        manifest: of the bundle.
        request: the request.
        maps: of the bundle's ids.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], weights float32 [N] or None.
    """
    checked = kjt.check([accept(Schema.of(manifest, maps), request)])
    weights = None if checked.weights is None else torch.from_numpy(checked.weights)
    return torch.from_numpy(checked.values), torch.from_numpy(checked.offsets), weights


def run_program(program: nn.Module, manifest: Manifest, probe: Tensors, maps: IdMaps | None) -> Outputs:
    """The outputs of a program, compiled or not.

    Args:
        program: of the bundle.
        manifest: of the bundle.
        probe: the request.
        maps: of the bundle's ids.
    """
    schema = Schema.of(manifest, maps)
    checked = kjt.check([accept(schema, probe)])
    batches = batches_of(schema, checked)
    return outputs_of(checked, batches, [program(*arguments(batch)).numpy() for batch in batches])[0]
