"""The answers of the trained module itself to a probe, computed by TorchRec.

They share no code with what is served. They show what the rows of a table cannot: a wrapper that changes ids, another
pooling, swapped tables.
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
        numbers: float32 [B, dim]; [n, dim] for a feature that is not pooled.
        unit: the largest relative rounding error of a number in the module.
    """

    numbers: npt.NDArray[np.float32]
    unit: float


def trained_answers(trained: Trained, manifest: Manifest, probe: Tensors) -> dict[str, TrainedAnswer]:
    """The answers of a module's collections to a probe, by feature.

    A module that takes one argument is called with the KJT, and the answers of its collections are recorded. A
    collection that this call does not reach is called with the KJT itself. Collections that torch cannot run are left
    out: on the meta device, where they have no weights, and weighted ones that take means or are not FP32.

    Args:
        trained: the module and its collections.
        manifest: has the keys of the probe.
        probe: a request for all keys.
    """
    collections = {
        path: trained.collections[path]
        for path, tables in trained.by_collection.items()
        if _is_runnable(trained.collections[path], tables)
    }
    recorded = _recorded_answers(trained, manifest, probe, collections.values())
    answers: dict[str, TrainedAnswer] = {}
    for path, collection in collections.items():
        features = [name for table in trained.by_collection[path] for name in table.features]
        columns = _columns(recorded[collection])
        # torch's eps is the distance from 1 to the next number; a rounding error is at most half of it.
        unit = max(torch.finfo(parameter.dtype).eps / 2 for parameter in inner_of(collection)[1].parameters())
        answers |= {
            name: TrainedAnswer(numbers.float().cpu().numpy(), unit)
            for name, numbers in zip(features, columns, strict=True)
        }
    return answers


def _recorded_answers(
    trained: Trained, manifest: Manifest, probe: Tensors, collections: Collection[nn.Module]
) -> dict[nn.Module, Any]:
    """The answer of each collection to the probe."""
    answers: dict[nn.Module, Any] = {}
    recording = record_answers(collections, answers)
    with torch.no_grad(), evaluating(trained.module), looking_up(trained.module), quiet(), recording:
        for entry in trained.entries:
            if entry.inputs == 1 and not {*entry.module.modules()}.isdisjoint(collections):
                with suppress(Exception):  # the user's own code may not take a KJT
                    entry.module(kjt_of(manifest, probe, _device_of(entry.module)))
        for collection in collections:
            if collection not in answers:
                collection(kjt_of(manifest, probe, _device_of(collection)))
    return answers


def _columns(answer: Any) -> Sequence[torch.Tensor]:
    """The answer of each feature: [B, dim] of a KeyedTensor, [n, dim] of JaggedTensors by feature."""
    if isinstance(answer, Mapping):
        return [jagged.values() for jagged in answer.values()]
    columns: Sequence[torch.Tensor] = answer.values().split(answer.length_per_key(), dim=1)
    return columns


def _is_runnable(collection: nn.Module, tables: Iterable[TrainedTable]) -> bool:
    """Whether torch can run a collection."""
    parameters = list(inner_of(collection)[1].parameters())
    is_narrow = any(parameter.dtype is not torch.float32 for parameter in parameters)
    unsupported = any(table.pooling is Pooling.MEAN for table in tables) or is_narrow
    is_weighted = any(table.weighted for table in tables)
    return not any(parameter.is_meta for parameter in parameters) and not (is_weighted and unsupported)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


@contextmanager
def record_answers(modules: Iterable[nn.Module], answers: dict[nn.Module, Any]) -> Iterator[None]:
    """In the block, put each answer of `modules` into `answers`, without the remapped ids that some return."""

    def record(module: nn.Module, _: object, answer: Any) -> None:
        # A copy: the rest of the forward may write to the answer.
        answers[module] = copy.deepcopy(answer[0] if isinstance(answer, tuple) else answer)

    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_hook(record)
            stack.callback(hook.remove)
        yield
