"""What the trained module itself answers to a probe, run by TorchRec.

That answer shares no code with what is served. It shows what a table's rows cannot: a wrapper that changes ids,
another pooling, tables that are mixed up.
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

from export.trained.eval_mode import evaluating, quiet
from export.trained.managed_collision import looking_up
from export.trained.probe_request import kjt_of
from export.trained.tables import Trained, TrainedTable
from export.trained.wrapped_collections import inner_of
from serving.bundle.manifest import Manifest
from serving.bundle.tables import Pooling
from serving.requests.types import Tensors


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
        path: trained.collections[path]
        for path, tables in trained.by_collection.items()
        if _runs(trained.collections[path], tables)
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
    hearing = record_answers(collections, heard)
    with torch.no_grad(), evaluating(trained.module), looking_up(trained.module), quiet(), hearing:
        for entry in trained.entries:
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


@contextmanager
def record_answers(modules: Iterable[nn.Module], heard: dict[nn.Module, Any]) -> Iterator[None]:
    """Put each answer of `modules` into `heard`. Those that remap ids answer with these, too."""

    def hear(module: nn.Module, _: object, answer: Any) -> None:
        # A copy: what follows may write to it.
        heard[module] = copy.deepcopy(answer[0] if isinstance(answer, tuple) else answer)

    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_hook(hear)
            stack.callback(hook.remove)
        yield
