"""Tables and requests shaped like MLPerf's DLRM-v2: 26 tables, 214 ids a sample."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torchrec import EmbeddingBagCollection

from examples.hosts.dlrm import IDS_PER_SAMPLE, ROWS, dlrm_tables
from export import ExportConfig, export_model
from serving.model.settings import ServingSettings

ROW_CAP = 100_000
DIM = 64
WIDTH = DIM * len(ROWS)
NAME = "dlrm"


@dataclass(frozen=True, slots=True)
class Arrays:
    """A request over all features: values int64 [N], lengths int32 [F·B]."""

    values: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]


def module(row_cap: int = ROW_CAP, dim: int = DIM) -> EmbeddingBagCollection:
    """Random tables, the same ones every time."""
    torch.manual_seed(0)
    return dlrm_tables(row_cap, dim, None)


def whole() -> EmbeddingBagCollection:
    """The tables as they are, 104 GB of FP32, on the meta device: to plan with."""
    return dlrm_tables()


@dataclass(frozen=True, slots=True)
class Workload:
    """The exported tables, and requests for them."""

    bundle: Path

    @classmethod
    def export(cls, repository: Path, config: ExportConfig | None = None) -> Self:
        """Export the tables, as int8 on one rank unless `config` says otherwise.

        128 clients with 128 samples each wait longer than a model has them wait by default: they are measured too.
        """
        patient = ExportConfig(serving=ServingSettings(max_busy_ms=10_000))
        return cls(export_model(module(), repository, NAME, config or patient))

    def request(self, samples: int, seed: int = 0) -> Arrays:
        """Uniform ids: the hardest on caches."""
        random = np.random.default_rng(seed)
        values = [
            random.integers(0, min(rows, ROW_CAP), ids * samples)
            for rows, ids in zip(ROWS, IDS_PER_SAMPLE, strict=True)
        ]
        lengths = np.repeat(np.array(IDS_PER_SAMPLE, np.int32), samples)
        return Arrays(np.concatenate(values), lengths)
