"""A whole model and requests for its scores, as every candidate needs them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

from benchmarks.peer_workload import MODEL, Floats, PeerWorkload, save_requests
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn, save_dense_part, train
from export import ExportConfig, export_model
from serving.client import ModelInfo
from serving.client.messages import infer_request
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors

OUTPUT = "scores"


@dataclass(frozen=True, slots=True)
class ScoresWorkload:
    """The tables of another workload in a model, and what is asked of it.

    Attributes:
        tables: the tables, and the ids of the requests.
        model: with FP32 rows; answers scores [B, 1].
        dense: dense inputs by the number of samples, [requests, samples, WIDTH].
    """

    tables: PeerWorkload
    model: DLRM_DCN
    dense: Mapping[int, Floats]

    @classmethod
    def make(cls, tables: PeerWorkload) -> Self:
        """With the float rows of `tables`, and a dense part that was trained on its requests."""
        collection = EmbeddingBagCollection(tables.module().embedding_bag_configs(), device=torch.device("cpu"))
        with torch.no_grad():
            for number, rows in enumerate(tables.rows):
                weight = collection.embedding_bags[f"t{number}"].weight
                weight.copy_(tables.stored(number).read(0, rows))
                weight.requires_grad = False
        random = np.random.default_rng(0)
        dense = {
            samples: random.random((len(requests), samples, WIDTH), np.float32)
            for samples, requests in tables.requests.items()
        }
        workload = cls(tables, dlrm_dcn(collection), dense)
        train(workload.model, [workload._kjt(tensor) for tensor in workload.tensors(max(tables.requests))])
        workload.model.eval()
        return workload

    def tensors(self, samples: int) -> list[Tensors]:
        """The requests as we take them."""
        return [
            replace(tensors, outputs=(OUTPUT,), dense={DENSE: dense})
            for tensors, dense in zip(self.tables.tensors(samples), self.dense[samples], strict=True)
        ]

    def export(self, repository: Path) -> Path:
        """Our bundle. Clients with 128 samples each wait longer than a model has them wait by default."""
        config = ExportConfig(scores=True, serving=ServingSettings(max_busy_ms=10_000))
        return export_model(self.model, repository, MODEL, config)

    def write(self, folder: Path, info: ModelInfo) -> None:
        """What peers and the load generator read.

        Args:
            info: of our model, as it is served.
        """
        self.tables.write_tables(folder, ["int8"])
        save_dense_part(self.model, folder / "dense.pt")
        (folder / "dense.json").write_text(json.dumps({"inputs": WIDTH, "outputs": 1}))
        for samples in self.tables.requests:
            tensors = self.tensors(samples)
            ours = [infer_request(MODEL, tensor, info).SerializeToString() for tensor in tensors]
            arrays: dict[str, npt.NDArray[np.generic]] = {
                "ids": self.tables.padded(samples),
                "dense": self.dense[samples],
            }
            save_requests(folder, samples, arrays, ours, self.answer(tensors[0]))

    def answer(self, tensors: Tensors) -> Floats:
        """The model's own scores, [B, 1]."""
        with torch.no_grad():
            scores: Floats = self.model(torch.from_numpy(tensors.dense[DENSE]), self._kjt(tensors)).numpy()
        return scores

    def _kjt(self, tensors: Tensors) -> KeyedJaggedTensor:
        keys = [f"f{number}" for number in self.tables.order]
        return KeyedJaggedTensor(keys, torch.from_numpy(tensors.values), lengths=torch.from_numpy(tensors.lengths))
