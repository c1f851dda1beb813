"""A whole model and requests for its scores, as every candidate needs them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torchrec.models.dlrm import DLRM_DCN

from benchmarks.peer_workload import MODEL, Floats, PeerWorkload, save_requests
from benchmarks.scored_workload import ScoredWorkload
from benchmarks.scores_model import DENSE, WIDTH, dlrm_dcn, save_dense_part, train
from export import ExportConfig, export_model
from serving.client import ModelInfo
from serving.client.messages import infer_request
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors


@dataclass(frozen=True, slots=True)
class ScoresWorkload(ScoredWorkload):
    """The tables of another workload in a model, and what is asked of it.

    Attributes:
        tables: the tables, and the ids of the requests.
        model: with FP32 rows; answers scores [B, 1].
        dense: dense inputs by the number of samples, [requests, samples, WIDTH].
    """

    model: DLRM_DCN

    @classmethod
    def make(cls, tables: PeerWorkload) -> Self:
        """With the float rows of `tables`, and a dense part that was trained on its requests."""
        random = np.random.default_rng(0)
        dense = {
            samples: random.random((len(requests), samples, WIDTH), np.float32)
            for samples, requests in tables.requests.items()
        }
        workload = cls(tables, dlrm_dcn(tables.pooled()), dense)
        train(workload.model, [workload.kjt(tensor) for tensor in workload.tensors(max(tables.requests))])
        workload.model.eval()
        return workload

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
            scores: Floats = self.model(torch.from_numpy(tensors.dense[DENSE]), self.kjt(tensors)).numpy()
        return scores
