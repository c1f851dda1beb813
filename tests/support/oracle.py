"""What the right answer is, in plain numpy: no FBGEMM, no torch, nothing of `export` or `serving`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BITS = {"FP32": 32, "FP16": 16, "INT8": 8, "INT4": 4, "INT2": 2}


def pool(
    table: npt.NDArray[Any],
    bags: Sequence[Sequence[int]],
    pooling: str,
    weights: Sequence[Sequence[float]] | None = None,
) -> Floats:
    """One bag after the other: [B, dim]."""
    answer = np.zeros((len(bags), table.shape[1]))
    for sample, bag in enumerate(bags):
        for position, id_ in enumerate(bag):
            answer[sample] += table[id_].astype(np.float64) * (weights[sample][position] if weights else 1)
        if pooling == "MEAN" and bag:
            answer[sample] /= len(bag)
    return answer


def exported_table(bundle: Path, name: str) -> npt.NDArray[np.float32]:
    """The numbers a bundle holds for a table, unpacked bit by bit from the raw bytes of its shards.

    Every number must be stored exactly once, or, data-parallel, once by each rank and the same.
    """
    manifest = json.loads((bundle / "manifest.json").read_text())
    table = next(table for table in manifest["tables"] if table["name"] == name)
    plan = manifest["plan"]
    numbers = np.full((table["rows"], table["dim"]), np.nan, np.float32)
    copies = np.zeros(numbers.shape, int)
    for shard in plan["shards"]:
        if shard["table"] == name:
            raw = (bundle / plan["ranks"][shard["rank"]]["weights"]).read_bytes()
            (top, bottom), (left, right) = shard["rows"], shard["columns"]
            found = unpacked(raw[shard["offset_bytes"] :], bottom - top, right - left, table["dtype"])
            here = (slice(top, bottom), slice(left, right))
            assert (np.isnan(numbers[here]) | (numbers[here] == found)).all()
            numbers[here] = found
            copies[here] += 1
    assert (copies == (len(plan["ranks"]) if plan["sharding"][name] == "data_parallel" else 1)).all()
    return numbers


def unpacked(raw: bytes, rows: int, columns: int, dtype: str) -> npt.NDArray[np.float32]:
    """The numbers of stored rows, float32 [rows, columns]."""
    bits = BITS[dtype]
    header = 4 if dtype.startswith("INT") else 0
    row_bytes = header + columns * bits // 8
    stored = np.frombuffer(raw, np.uint8, rows * row_bytes).reshape(rows, row_bytes)
    if bits >= 16:
        return np.frombuffer(stored.tobytes(), f"<f{bits // 8}").reshape(rows, columns).astype(np.float32)
    scale, bias = np.frombuffer(stored[:, :4].tobytes(), "<f2").reshape(rows, 2).T.astype(np.float32)
    unpacked = np.unpackbits(stored[:, 4:], axis=1, bitorder="little").reshape(rows, columns, bits)
    codes = (unpacked * (1 << np.arange(bits))).sum(axis=2).astype(np.float32)
    numbers: npt.NDArray[np.float32] = codes * scale[:, None] + bias[:, None]
    return numbers


def row_range_bound(table: npt.NDArray[Any], dtype: str) -> Floats:
    """How far quantizing may move an element of each row: half a step, and FP16 rounding of range and minimum."""
    rows = table.astype(np.float64)
    if dtype == "FP32":
        return np.zeros(len(rows))
    largest: Floats = np.abs(rows).max(axis=1)
    if dtype == "FP16":
        return largest * 2.0**-11 + 2.0**-24
    low, high = rows.min(axis=1), rows.max(axis=1)
    steps = 2 ** BITS[dtype] - 1
    spread: Floats = high - low
    bound: Floats = spread * (0.5 / steps + 2.0**-10) + largest * 2.0**-10 + steps * 2.0**-23
    return bound
