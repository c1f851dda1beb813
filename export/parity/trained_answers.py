"""What the trained module itself answers, run by TorchRec on a KeyedJaggedTensor.

It shares no code with what is served. It shows what a table's rows cannot: a wrapper that changes ids, another
pooling, tables that are mixed up.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from export.errors import ParityError
from export.parity.answers import Answers
from export.quiet import quiet
from export.rows.table_error import TableError
from export.rows.tally import Tally, finite
from export.trained.inner import inner_of
from export.trained.managed import looking_up
from export.trained.modules import evaluating
from export.trained.tables import Trained, TrainedTable
from serving.bundle.manifest import Agreement, Manifest
from serving.bundle.rows import FP32_UNIT
from serving.bundle.tables import Pooling
from serving.request.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a trained module for one feature.

    Attributes:
        numbers: float32 [B, dim]; of a feature that is not pooled [n, dim].
        unit: how the module rounds a number, at most, relative to the number.
    """

    numbers: npt.NDArray[np.float32]
    unit: float


def trained_answers(trained: Trained, manifest: Manifest, probe: Tensors) -> dict[str, Answer]:
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
    answers: dict[str, Answer] = {}
    for path, collection in collections.items():
        features = [name for table in trained.by_collection[path] for name in table.features]
        columns = _columns(heard[collection])
        # torch's eps is the distance from 1 to the next number: rounding is off by half of it.
        unit = max(torch.finfo(parameter.dtype).eps / 2 for parameter in inner_of(collection)[1].parameters())
        answers |= {
            name: Answer(each.float().cpu().numpy(), unit) for name, each in zip(features, columns, strict=True)
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


def compare_trained(
    trained: Mapping[str, Answer], manifest: Manifest, answers: Answers, errors: Mapping[str, TableError]
) -> dict[str, Agreement]:
    """How far the answers of the published files are from those of the trained module, by table.

    An answer may be off by as much as rounding explains, plus, for each id of its bag, the largest error of an
    element of its table.

    Args:
        trained: the module's answers to `answers.probe`, by feature.
        manifest: features and tables.
        answers: of the published files.
        errors: of each table, float rows compared with stored ones.

    Raises:
        ParityError: an answer is further off.
    """
    tallies: dict[str, Tally] = {}
    bounds = dict(zip(answers.pooled.features, answers.pooled.bounds, strict=True))
    ids = _ids_in_bags(manifest, answers.probe)
    for feature, table in zip(manifest.features, manifest.feature_tables, strict=True):
        if (expected := trained.get(feature.name)) is None:
            continue
        ours, theirs = finite(answers.reloaded[feature.name].astype(np.float64), expected.numbers.astype(np.float64))
        moved = np.abs(ours - theirs)
        counts = ids[feature.name] if table.pooling is Pooling.SUM else 1.0
        bound = bounds[feature.name] * (1 + expected.unit / FP32_UNIT)
        bound += counts * errors[table.name].tally.largest * (1 + 1e-6)
        if not ((moved <= bound) | np.isinf(bound)).all():
            raise ParityError(
                f"table {table.name!r}: the trained module answers otherwise for feature {feature.name!r}, by "
                f"{moved.max():.3g}: something around the table changes ids, weights or how it is pooled"
            )
        # Where a sum may leave the range of its dtype, nothing is compared.
        ours, theirs = (np.where(np.isinf(bound), 0, each) for each in (ours, theirs))
        tallies.setdefault(table.name, Tally()).add(0, theirs, ours)
    return {name: tally.agreement for name, tally in tallies.items()}


def _ids_in_bags(manifest: Manifest, probe: Tensors) -> dict[str, npt.NDArray[np.float64]]:
    """The number of ids in each bag, or the sum of |weight| over them: by feature, float64 [B, 1]."""
    bags = probe.lengths.reshape(len(manifest.keys), -1)
    weights = np.ones(probe.values.size) if probe.weights is None else np.abs(probe.weights.astype(np.float64))
    sums = np.concatenate([[0], np.cumsum(weights)])[np.concatenate([[0], np.cumsum(bags)])]
    by_bag = np.diff(sums).reshape(bags.shape)
    found = {}
    for lengths, sent, features in zip(bags, by_bag, manifest.keys.values(), strict=True):
        for feature in features:
            counts = sent
            if feature.position_weights is not None:
                by_position = np.abs(feature.position_weights or np.ones(lengths.max(initial=0)))
                counts = np.concatenate([[0.0], np.cumsum(by_position)])[lengths]
            found[feature.name] = counts[:, np.newaxis]
    return found


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def kjt_of(manifest: Manifest, probe: Tensors, device: torch.device) -> KeyedJaggedTensor:
    """A copy of the probe, which a module may write to."""
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
