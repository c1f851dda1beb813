"""A day of rows for the ranker of tests, as a Parquet file."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.support.models import SUM, random_bags

ROWS, ROW_GROUP = 1_000, 150


def day_table(rows: int = ROWS, seed: int = 0) -> Any:
    """Rows with the features and dense inputs of `tests.support.ranker.ranker`, and an id and a day to carry over."""
    random = np.random.default_rng(seed)
    return pa.table(
        {"id": np.arange(rows), "day": ["mon"] * rows}
        | random_bags(random, SUM, rows)
        | {
            "user": random.random((rows, 3), np.float32).tolist(),
            "item": random.random((rows, 2), np.float32).tolist(),
        }
    )


def write_day(path: Path, table: Any = None, row_group: int = ROW_GROUP) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(day_table() if table is None else table, path, row_group_size=row_group)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
