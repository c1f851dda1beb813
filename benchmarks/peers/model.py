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
            program = torch.jit.load(folder / "dense.pt")
            first = 0
            if "user" in dense:
                first = dense["user_rows"]
                whole = _UserOnce(self.tables, program, dense["user"], first)
                self.inputs["ids"] = (np.int64, self.tables.ids - sum(whole.ids[number] for number in dense["user"]))
                self.whole = torch.jit.script(whole)
            else:
                self.whole = torch.jit.script(_Whole(self.tables, program))
            for samples in _FIRST_CALLS:
                shapes = {name: ((first + samples, width), dtype) for name, (dtype, width) in self.inputs.items()}
                self(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})

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


class _UserOnce(_Whole):
    """The same for many items of one user: the user's features are looked up once, and expanded.

    Args:
        user: the numbers of these features.
        user_rows: the first rows of `ids`, and of `dense`, which hold the user's ids.
    """

    def __init__(self, tables: Tables, dense: torch.nn.Module, user: list[int], user_rows: int) -> None:
        super().__init__(tables, dense)
        self.is_of_user = [number in user for number in range(len(self.ids))]
        self.user_rows = user_rows

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        user, items = ids[: self.user_rows].reshape(1, -1), ids[self.user_rows :]
        parts: list[torch.Tensor] = []
        start, user_start = 0, 0
        for weight, width, size, is_of_user in zip(self.weights, self.ids, self.bags, self.is_of_user):  # noqa: B905
            if is_of_user:
                bag = user[:, user_start : user_start + width]
                user_start += width
            else:
                bag = items[:, start : start + width]
                start += width
            bag = bag.contiguous().view(-1)
            offsets = torch.arange(0, bag.numel() + 1, size)
            rows = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
                weight, bag, offsets, include_last_offset=True
            )
            rows = rows.view(1, -1).expand(items.size(0), -1) if is_of_user else rows.view(items.size(0), -1)
            parts.append(rows)
        return self.dense(torch.cat(parts, 1), dense[self.user_rows :])
