"""What every peer serves: the tables, or a whole model where the folder has its dense part."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from arrays import Arrays
from tables import Tables

# TorchScript watches two calls, compiles then, and again when another number of samples comes.
_FIRST_CALLS = (1, 1, 1, 2, 2, 3, 128)


class Model:
    """The workload at `folder`: the tables in rows of `kind`, and its `dense.pt` behind them if there is one.

    Attributes:
        inputs: dtype and width of each array of a request, by name.
        output, width: what is answered, float32 [B, width].
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.tables = Tables(folder, kind)
        self.inputs = {"ids": (np.int64, self.tables.ids)}
        self.output, self.width, self.whole = "embeddings", self.tables.width, None
        if (folder / "dense.pt").exists():
            dense = json.loads((folder / "dense.json").read_text())
            self.inputs["dense"] = (np.float32, dense["inputs"])
            self.output, self.width = "scores", dense["outputs"]
            self.whole = torch.jit.script(_Whole(self.tables, torch.jit.load(folder / "dense.pt")))
            for samples in _FIRST_CALLS:
                self(**{name: np.zeros((samples, width), dtype) for name, (dtype, width) in self.inputs.items()})

    @classmethod
    def from_environment(cls) -> "Model":
        """As BENCH_TABLES and BENCH_KIND say: for peers that start processes of their own."""
        return cls(Path(os.environ["BENCH_TABLES"]), os.environ["BENCH_KIND"])

    @classmethod
    def from_arguments(cls) -> tuple["Model", int]:
        """`FOLDER KIND PORT` of the command line."""
        folder, kind, port = sys.argv[1:4]
        return cls(Path(folder), kind), int(port)

    def __call__(self, ids: np.ndarray, dense: np.ndarray | None = None) -> np.ndarray:
        """The answer, float32 [B, width], to `ids` int64 [B, ids] and, of a whole model, `dense` float32."""
        if self.whole is None:
            return self.tables(ids)
        with torch.inference_mode():
            return self.whole(torch.from_numpy(ids), torch.from_numpy(dense)).numpy()

    def together(self, requests: list[Arrays]) -> list[np.ndarray]:
        """The answers to requests that wait, joined."""
        ends = np.cumsum([len(request["ids"]) for request in requests])[:-1]
        joined = {name: np.concatenate([request[name] for request in requests]) for name in self.inputs}
        return np.split(self(**joined), ends)


class _Whole(torch.nn.Module):
    """torch's 8-bit rows and what follows them, for one program of TorchScript: a loop in Python takes longer."""

    def __init__(self, tables: Tables, dense: torch.nn.Module) -> None:
        super().__init__()
        assert tables.packed
        self.weights = [tables.weights[feature["table"]] for feature in tables.spec["features"]]
        self.ids = [int(feature["ids"]) for feature in tables.spec["features"]]
        # Ids of a bag: a sequence is bags of one id each.
        self.bags = [int(feature["ids"]) if feature["pooled"] else 1 for feature in tables.spec["features"]]
        self.dense = dense

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        start = 0
        for weight, width, size in zip(self.weights, self.ids, self.bags):  # noqa: B905  TorchScript knows no strict
            bag = ids[:, start : start + width].contiguous().view(-1)
            start += width
            offsets = torch.arange(0, bag.numel() + 1, size)
            rows = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
                weight, bag, offsets, include_last_offset=True
            )
            parts.append(rows.view(ids.size(0), -1))
        return self.dense(torch.cat(parts, 1), dense)
