"""What the trained module itself answers, run by TorchRec on a KeyedJaggedTensor: the oracle of an export.

It shares no code with what is served, and sees what a table's rows cannot show: ids that a wrapper changes, a bag
that is pooled otherwise, tables that are mixed up.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from export.agreement import Tally, difference
from export.errors import ParityError
from export.modules import evaluating
from export.parity import Answers, TableError
from export.quiet import quiet
from export.tables import Trained, TrainedTable
from serving.bundle import Agreement, Manifest, Pooling
from serving.dequantize import FP16_UNIT, FP32_UNIT
from serving.encoding import decode
from serving.kjt import Tensors


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer [B, dim] of a trained module for a feature, and how its numbers round: half a unit of 1."""

    numbers: npt.NDArray[np.float32]
    unit: float


def trained_answers(trained: Trained, manifest: Manifest, probe: Tensors) -> dict[str, Answer]:
    """The answers of the collections of a module to `probe`, by feature.

    A module that takes one argument is called with the KJT, and its collections are listened to; where it does not
    take that, or takes more, each collection is called. What cannot be run is left out: collections without weights
    (the meta device), and weighted ones that take means or are FP16, which torch does not have.
    """
    answers: dict[str, Answer] = {}
    collections = {
        path: trained.found.collections[path]
        for path, tables in trained.by_collection.items()
        if _runs(trained.found.collections[path], tables)
    }
    heard: dict[nn.Module, Any] = {}
    with torch.no_grad(), evaluating(trained.module), quiet(), _listening(collections.values(), heard):
        for entry in trained.found.entries:
            if entry.inputs == 1 and not {*entry.module.modules()}.isdisjoint(collections.values()):
                with suppress(Exception):  # the user's own code: it may want something else than a KJT
                    entry.module(_kjt(manifest, probe, entry.module))
        for collection in collections.values():
            if collection not in heard:
                collection(_kjt(manifest, probe, collection))
    for path, collection in collections.items():
        features = [name for table in trained.by_collection[path] for name in table.features]
        answered = heard[collection]
        columns = answered.values().split(answered.length_per_key(), dim=1)
        unit = FP16_UNIT if _is_half(collection.parameters()) else FP32_UNIT
        answers |= {
            name: Answer(each.float().cpu().numpy(), unit) for name, each in zip(features, columns, strict=True)
        }
    return answers


def _runs(collection: nn.Module, tables: Iterable[TrainedTable]) -> bool:
    """Whether torch can run a collection."""
    parameters = list(collection.parameters())
    unsupported = any(table.pooling is Pooling.MEAN for table in tables) or _is_half(parameters)
    is_weighted = any(table.weighted for table in tables)
    return not any(parameter.is_meta for parameter in parameters) and not (is_weighted and unsupported)


def _is_half(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.dtype is torch.float16 for parameter in parameters)


def compare_trained(
    trained: Mapping[str, Answer], manifest: Manifest, answers: Answers, errors: Mapping[str, TableError]
) -> dict[str, Agreement]:
    """How far the published files are from the trained module, by table.

    Args:
        trained: its answers to `answers.probe`.
        errors: how far each table's stored elements are from its float ones: a bag may be as far off for each id.

    Raises:
        ParityError: an answer is further off.
    """
    tallies: dict[str, Tally] = {}
    bounds = dict(zip(answers.pooled.features, answers.pooled.bounds, strict=True))
    served = decode(answers.reloaded, {name: bound.shape[1] for name, bound in bounds.items()})
    ids = _ids_in_bags(manifest, answers.probe)
    for feature, table in zip(manifest.features, manifest.feature_tables, strict=True):
        if (expected := trained.get(feature.name)) is None:
            continue
        moved = np.abs(difference(served[feature.name].astype(np.float64), expected.numbers))
        counts = 1.0 if table.pooling is Pooling.MEAN else ids[feature.key]
        bound = bounds[feature.name] * (1 + expected.unit / FP32_UNIT)
        bound += counts * errors[table.name].tally.largest * (1 + 1e-6)
        if not ((moved <= bound) | np.isinf(bound)).all():
            raise ParityError(
                f"table {table.name!r}: the trained module answers otherwise for feature {feature.name!r}, by "
                f"{moved.max():.3g}: something around the table changes ids, weights or how it is pooled"
            )
        comparable = np.where(np.isinf(bound), expected.numbers, served[feature.name]).astype(np.float64)
        tallies.setdefault(table.name, Tally()).add(0, expected.numbers.astype(np.float64), comparable)
    return {name: tally.agreement for name, tally in tallies.items()}


def _ids_in_bags(manifest: Manifest, probe: Tensors) -> dict[str, npt.NDArray[np.float64]]:
    """How many ids are in each bag of each key, or the sum of the sizes of their weights [B, 1]."""
    bags = probe.lengths.reshape(len(manifest.keys), -1)
    weights = np.ones(probe.values.size) if probe.weights is None else np.abs(probe.weights.astype(np.float64))
    sums = np.concatenate([[0], np.cumsum(weights)])[np.concatenate([[0], np.cumsum(bags)])]
    by_bag = np.diff(sums).reshape(bags.shape)
    return {key: counts[:, np.newaxis] for key, counts in zip(manifest.keys, by_bag, strict=True)}


def _kjt(manifest: Manifest, probe: Tensors, module: nn.Module) -> KeyedJaggedTensor:
    """A copy of the probe, which the module may write to, on its device."""
    return KeyedJaggedTensor(
        keys=list(manifest.keys),
        values=torch.tensor(probe.values),
        lengths=torch.tensor(probe.lengths),
        weights=None if probe.weights is None else torch.tensor(probe.weights),
    ).to(next(module.parameters()).device)


@contextmanager
def _listening(modules: Iterable[nn.Module], heard: dict[nn.Module, Any]) -> Iterator[None]:
    """Keep what `modules` answer."""
    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_hook(lambda each, _, answer: heard.__setitem__(each, answer))
            stack.callback(hook.remove)
        yield
