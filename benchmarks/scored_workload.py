"""What workloads with scores share: requests with dense inputs, as we take them and as TorchRec does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from benchmarks.peer_workload import Floats, PeerWorkload
from benchmarks.scores_model import DENSE
from serving.requests.types import Tensors

OUTPUT = "scores"


@dataclass(frozen=True, slots=True)
class ScoredWorkload:
    """A model over the tables of a workload, and requests for its scores.

    Attributes:
        tables: the tables, and the ids of the requests.
        model: with FP32 rows.
        dense: dense inputs by the number of samples, [requests, samples, WIDTH].
    """

    tables: PeerWorkload
    model: nn.Module
    dense: Mapping[int, Floats]

    def tensors(self, samples: int) -> list[Tensors]:
        """The requests as we take them."""
        return [
            replace(tensors, outputs=(OUTPUT,), dense={DENSE: dense})
            for tensors, dense in zip(self.tables.tensors(samples), self.dense[samples], strict=True)
        ]

    def kjt(self, tensors: Tensors) -> KeyedJaggedTensor:
        """The ids of a request, as TorchRec takes them."""
        keys = [f"f{number}" for number in self.tables.order]
        return KeyedJaggedTensor(keys, torch.from_numpy(tensors.values), lengths=torch.from_numpy(tensors.lengths))
