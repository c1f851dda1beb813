"""What every peer looks up: one torch EmbeddingBag a feature, FP32 or torch's own 8-bit rows, over shared pages."""

import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import embedding_bag


class Tables:
    """The workload at `folder`: `tables.json`, and a file of FP32 rows and one of packed rows for each table.

    Args:
        kind: `fp32` or `int8`.
        features: numbers of those that are looked up. None: all.
    """

    def __init__(self, folder: Path, kind: str, features: list[int] | None = None) -> None:
        torch.set_num_threads(1)
        self.spec = json.loads((folder / "tables.json").read_text())
        if features is not None:
            self.spec["features"] = [self.spec["features"][number] for number in features]
        self.packed = kind == "int8"
        self.weights = []
        for number, table in enumerate(self.spec["tables"]):
            # torch packs a row of dim codes with an FP32 scale and bias behind them.
            width, dtype = (table["dim"] + 8, torch.uint8) if self.packed else (table["dim"], torch.float32)
            path = str(folder / f"{number}.{kind}")
            rows = torch.from_file(path, shared=True, size=table["rows"] * width, dtype=dtype)
            self.weights.append(rows.view(table["rows"], width))

    @property
    def ids(self) -> int:
        """Ids of a sample."""
        return sum(feature["ids"] for feature in self.spec["features"])

    @property
    def width(self) -> int:
        """Columns of an answer."""
        return sum(self.spec["tables"][feature["table"]]["dim"] for feature in self.spec["features"])

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """`embeddings` float32 [B, D] of `ids` int64 [B, ids]."""
        bags, parts, start = torch.from_numpy(ids), [], 0
        with torch.inference_mode():
            for feature in self.spec["features"]:
                bag = bags[:, start : start + feature["ids"]]
                start += feature["ids"]
                weight = self.weights[feature["table"]]
                parts.append(self._packed(weight, bag) if self.packed else embedding_bag(bag, weight, mode="sum"))
            return torch.cat(parts, 1).numpy()

    def _packed(self, weight: torch.Tensor, bag: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, bag.numel() + 1, bag.size(1))
        return torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            weight, bag.contiguous().view(-1), offsets, include_last_offset=True
        )
