"""A probe: a request for all keys, and what the trained module itself answers to it, run by TorchRec.

That answer shares no code with what is served. It shows what a table's rows cannot: a wrapper that changes ids,
another pooling, tables that are mixed up.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from export.trained.managed import inner_of, looking_up
from export.trained.running import evaluating, quiet
from export.trained.tables import Trained, TrainedTable
from serving.bundle.manifest import Manifest
from serving.bundle.tables import ANY_INT64, Pooling
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


@dataclass(frozen=True, slots=True)
class TrainedAnswer:
    """The answer of a trained module for one feature.

    Attributes:
        numbers: float32 [B, dim]; of a feature that is not pooled [n, dim].
        unit: how the module rounds a number, at most, relative to the number.
    """

    numbers: npt.NDArray[np.float32]
    unit: float


def trained_answers(trained: Trained, manifest: Manifest, probe: Tensors) -> dict[str, TrainedAnswer]:
    """The answers of a module's collections to a probe, by feature.

    A module that takes one argument is given the KJT, and its collections' answers are recorded. A collection that
    got nothing so is given the KJT itself. Collections that torch cannot run are left out: those without weights (on
    the meta device), and weighted ones that take means or are not FP32.

    Args:
        trained: the module and its collections.
        manifest: it has the keys of the probe.
        probe: a request for all keys.
    """
    collections = {
        path: trained.found.collections[path]
        for path, tables in trained.by_collection.items()
        if _runs(trained.found.collections[path], tables)
    }
    heard = _hear(trained, manifest, probe, collections.values())
    answers: dict[str, TrainedAnswer] = {}
    for path, collection in collections.items():
        features = [name for table in trained.by_collection[path] for name in table.features]
        columns = _columns(heard[collection])
        # torch's eps is the distance from 1 to the next number: rounding is off by half of it.
        unit = max(torch.finfo(parameter.dtype).eps / 2 for parameter in inner_of(collection)[1].parameters())
        answers |= {
            name: TrainedAnswer(each.float().cpu().numpy(), unit)
            for name, each in zip(features, columns, strict=True)
        }
    return answers


def _hear(
    trained: Trained, manifest: Manifest, probe: Tensors, collections: Collection[nn.Module]
) -> dict[nn.Module, Any]:
    """What each of `collections` answers the probe with."""
    heard: dict[nn.Module, Any] = {}
    hearing = listening(collections, heard)
    with torch.no_grad(), evaluating(trained.module), looking_up(trained.module), quiet(), hearing:
        for entry in trained.found.entries:
            if entry.inputs == 1 and not {*entry.module.modules()}.isdisjoint(collections):
                with suppress(Exception):  # the user's own code may not take a KJT
                    entry.module(kjt_of(manifest, probe, _device_of(entry.module)))
        for collection in collections:
            if collection not in heard:
                collection(kjt_of(manifest, probe, _device_of(collection)))
    return heard


def _columns(answered: Any) -> Sequence[torch.Tensor]:
    """The answer of each feature: [B, dim] out of a KeyedTensor, [n, dim] of JaggedTensors by feature."""
    if isinstance(answered, Mapping):
        return [each.values() for each in answered.values()]
    found: Sequence[torch.Tensor] = answered.values().split(answered.length_per_key(), dim=1)
    return found


def _runs(collection: nn.Module, tables: Iterable[TrainedTable]) -> bool:
    """Whether torch can run a collection."""
    parameters = list(inner_of(collection)[1].parameters())
    is_narrow = any(parameter.dtype is not torch.float32 for parameter in parameters)
    unsupported = any(table.pooling is Pooling.MEAN for table in tables) or is_narrow
    is_weighted = any(table.weighted for table in tables)
    return not any(parameter.is_meta for parameter in parameters) and not (is_weighted and unsupported)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def kjt_of(manifest: Manifest, probe: Tensors, device: torch.device) -> KeyedJaggedTensor:
    """A copy of the probe, which a module may write to."""
    with quiet():  # torch.fx warns of its own wrapper of this class
        return KeyedJaggedTensor(
            keys=list(manifest.keys),
            values=torch.tensor(probe.values),
            lengths=torch.tensor(probe.lengths),
            weights=None if probe.weights is None else torch.tensor(probe.weights),
        ).to(device)


@contextmanager
def listening(modules: Iterable[nn.Module], heard: dict[nn.Module, Any]) -> Iterator[None]:
    """Put each answer of `modules` into `heard`. Those that remap ids answer with these, too."""

    def hear(module: nn.Module, _: object, answer: Any) -> None:
        # A copy: what follows may write to it.
        heard[module] = copy.deepcopy(answer[0] if isinstance(answer, tuple) else answer)

    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_hook(hear)
            stack.callback(hook.remove)
        yield
