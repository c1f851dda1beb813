"""A day of rows for the ranker of tests, as a Parquet file."""

import datetime
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
    """The files below a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def partitioned_day(rows: int = ROWS) -> Any:
    """Rows of five days and of two countries, with nulls, in an order that mixes them."""
    table = day_table(rows).drop_columns(["day"])
    days = [datetime.date(2026, 11, 1 + row * 7 % 5) for row in range(rows)]
    countries = [("DE", "a/b=c % é", None)[row * row % 3 if row % 11 else 2] for row in range(rows)]
    return table.append_column("day", pa.array(days)).append_column("country", pa.array(countries))
