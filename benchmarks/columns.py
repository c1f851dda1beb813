"""From columns to a request's arrays: a million rows of ten features, five of one id and five of lists of five."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

from benchmarks.measure import Result, interleave, p50
from serving.requests.encoding import encode

ROWS, ONE_HOT, MULTI_HOT, BAG = 1_000_000, 5, 5, 5
ROUNDS = 5
# Forms of Python objects are measured on a part of the rows, and the time is multiplied.
OBJECTS, PART = ("pandas", "lists"), 0.1
# By the name of a figure: how the page calls the form.
FORMS = {
    "arrays": "arrays: one of ids, or values and lengths",
    "pyarrow": "a pyarrow Table",
    "polars": "a polars DataFrame",
    "pandas_arrow": "a pandas DataFrame of Arrow's dtypes",
    "pandas": "a pandas DataFrame, lists as arrays in objects",
    "lists": "lists of ids and of lists",
}


def run() -> Iterator[Result]:
    """Seconds to encode the same rows from each form, on one core."""
    for names, rows in ((FORMS.keys() - {*OBJECTS}, ROWS), (OBJECTS, int(ROWS * PART))):
        candidates = _candidates(names, rows)
        expected = encode(_table(rows))
        for encode_form in candidates.values():
            encoded = encode_form()
            np.testing.assert_array_equal(encoded.values, expected.values)
            np.testing.assert_array_equal(encoded.lengths, expected.lengths)
        for name, seconds in interleave(candidates, ROUNDS, warm_up=0).items():
            yield Result(f"columns_{name}_s", p50(seconds) * ROWS / rows)


def _table(rows: int) -> Any:
    random = np.random.default_rng(0)
    one_hot = {f"one_{number}": random.integers(0, 1000, rows) for number in range(ONE_HOT)}
    multi_hot = {f"many_{number}": random.integers(0, 1000, rows * BAG) for number in range(MULTI_HOT)}
    bounds = pa.array(np.arange(0, rows * BAG + 1, BAG, dtype=np.int32))
    return pa.table(
        one_hot | {name: pa.ListArray.from_arrays(bounds, pa.array(ids)) for name, ids in multi_hot.items()}
    )


def _arrays(table: Any) -> dict[str, Any]:
    columns = {name: column.chunk(0) for name, column in zip(table.column_names, table.columns, strict=True)}
    return {
        name: (column.values.to_numpy(), np.full(len(column), BAG, np.int32))
        if isinstance(column, pa.ListArray)
        else column.to_numpy()
        for name, column in columns.items()
    }


# How each form is made of a pyarrow Table.
_MAKE: Mapping[str, Callable[[Any], Any]] = {
    "arrays": _arrays,
    "pyarrow": lambda table: table,
    "polars": pl.from_arrow,
    "pandas_arrow": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "pandas": lambda table: table.to_pandas(),
    "lists": lambda table: table.to_pydict(),
}


def _candidates(names: Collection[str], rows: int) -> Mapping[str, Callable[[], Any]]:
    table = _table(rows)
    return {name: partial(encode, _MAKE[name](table)) for name in names}
