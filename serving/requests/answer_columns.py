"""An answer as columns of a DataFrame. The DataFrame's library is imported on request."""

import math
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from serving.errors import ConfigurationError
from serving.notebook_table import notebook_table
from serving.requests.answers import JaggedRows
from serving.requests.types import Array, Lengths

Values = TypeVar("Values")
NO_LENGTHS: Mapping[str, Lengths] = MappingProxyType({})
# Of each array, in notebooks.
_SHOWN_NUMBERS = 4


class AnswerColumns(dict[str, Values]):
    """The answer of a model, by the name of the feature or output: arrays [B, …], or `JaggedRows` of B samples.

    The DataFrame has a row for each sample and a column for each name. [B] and [B, 1] become a column of numbers, and
    [B, n] and larger arrays a column of lists of n numbers. `JaggedRows`, and arrays with a row for each id of a key,
    become a column of lists of rows.

    Attributes:
        lengths: for each array with a row for each id of a key, the number of rows of each sample, int32 [B].
    """

    def __init__(self, values: Mapping[str, Values], lengths: Mapping[str, Lengths] = NO_LENGTHS) -> None:
        super().__init__(values)
        self.lengths = dict(lengths)

    def _repr_html_(self) -> str:
        """The shape and dtype of each array, and its first numbers, as notebooks show them."""
        return notebook_table(
            f"{len(self)} arrays by name", ("name", "shape", "dtype", "first numbers"), map(_summary, self.items())
        )

    def to_arrow(self) -> Any:
        """A pyarrow Table. Lists of n are fixed_size_lists. Numbers are not copied, but booleans are.

        Raises:
            ConfigurationError: pyarrow is not installed, or the columns have different numbers of rows.
        """
        pyarrow, columns = self._library_and_columns("pyarrow")
        return pyarrow.table({name: _arrow_column(pyarrow, values) for name, values in columns.items()})

    def to_polars(self) -> Any:
        """A polars DataFrame. Lists of n are Arrays. float16 becomes float32.

        Raises:
            ConfigurationError: polars is not installed, or the columns have different numbers of rows.
        """
        polars, columns = self._library_and_columns("polars")
        return polars.DataFrame([_polars_column(polars, name, values) for name, values in columns.items()])

    def to_pandas(self) -> Any:
        """A pandas DataFrame. Lists are numpy arrays: views of the answer.

        Raises:
            ConfigurationError: pandas is not installed, or the columns have different numbers of rows.
        """
        pandas, columns = self._library_and_columns("pandas")
        return pandas.DataFrame({name: _pandas_column(pandas, values) for name, values in columns.items()})

    def _library_and_columns(self, name: str) -> tuple[Any, dict[str, Any]]:
        columns: dict[str, Any] = {
            column: JaggedRows(values, self.lengths[column]) if column in self.lengths else values  # type: ignore[arg-type]
            for column, values in self.items()
        }
        rows = {column: len(values) for column, values in columns.items()}
        if len({*rows.values()}) > 1:
            raise ConfigurationError(
                f"answer: expected as many rows in each column, got {rows}: make a table each of what is shared, "
                "and of the rest"
            )
        try:
            return import_module(name), columns
        except ImportError as error:
            raise ConfigurationError(f"{name}: expected it to be installed: pip install {name}: {error}") from error


def _summary(item: tuple[str, Any]) -> tuple[str, str, str, str]:
    """Name, shape, dtype and first numbers of an array or of `JaggedRows`."""
    name, values = item
    is_jagged = isinstance(values, JaggedRows)
    array = values.values if is_jagged else values
    shape = f"{list(array.shape)}, rows of {len(values.lengths)} samples" if is_jagged else str(list(array.shape))
    numbers = array.reshape(-1)[:_SHOWN_NUMBERS]
    more = ", …" if array.size > _SHOWN_NUMBERS else ""
    return name, shape, str(array.dtype), ", ".join(f"{number:.4g}" for number in numbers.tolist()) + more


def _is_number(array: Array) -> bool:
    """Whether there is one number for each sample."""
    return math.prod(array.shape[1:]) == 1 and array.ndim <= 2


def _arrow_column(pyarrow: Any, values: Any) -> Any:
    if isinstance(values, JaggedRows):
        bounds = np.cumsum([0, *values.lengths], dtype=np.int64)
        return pyarrow.LargeListArray.from_arrays(bounds, _arrow_lists(pyarrow, values.values))
    return pyarrow.array(values.reshape(-1)) if _is_number(values) else _arrow_lists(pyarrow, values)


def _arrow_lists(pyarrow: Any, array: Array) -> Any:
    lists = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        kind = pyarrow.list_(lists.type, array.shape[axis])
        lists = pyarrow.FixedSizeListArray.from_arrays(lists, type=kind)
    return lists


def _polars_column(polars: Any, name: str, values: Any) -> Any:
    if not isinstance(values, JaggedRows):
        array = values.reshape(-1) if _is_number(values) else values
        return polars.Series(name, _float32_of_halves(array))
    samples = np.arange(len(values))
    rows = polars.DataFrame({"sample": np.repeat(samples, values.lengths), "rows": _float32_of_halves(values.values)})
    bags = rows.group_by("sample", maintain_order=True).all()
    column = polars.DataFrame({"sample": samples}).join(bags, on="sample", how="left", maintain_order="left")["rows"]
    return column.fill_null(polars.Series([[]], dtype=column.dtype)).alias(name)


def _float32_of_halves(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _pandas_column(pandas: Any, values: Any) -> Any:
    if isinstance(values, JaggedRows):
        return pandas.Series([values.rows(sample) for sample in range(len(values))], dtype=object)
    return values.reshape(-1) if _is_number(values) else pandas.Series([*values], dtype=object)
