"""Whole DataFrames as inputs, by the names of their columns. No library is imported."""

import sys
from collections.abc import Collection, Iterable
from typing import Any

from serving.errors import InvalidRequest

# The kinds of frames, by library, and the attribute with the names of their columns.
_FRAMES = (
    ("pandas", "DataFrame", "columns"),
    ("polars", "DataFrame", "columns"),
    ("pyarrow", "Table", "column_names"),
    ("pyarrow", "RecordBatch", "column_names"),
)
# The suffix of a feature's name in the name of the column with its weights.
_WEIGHTS = ".weights"


def is_frame(features: Any) -> bool:
    """Whether this is a DataFrame of pandas or polars, or a Table or RecordBatch of pyarrow."""
    return _column_names(features) is not None


def columns_of(frame: Any, names: Collection[str] | None = None, weighted: Iterable[str] = ()) -> dict[str, Any]:
    """Columns of a frame by name, in the order of the frame.

    Args:
        frame: a frame that `is_frame` recognises.
        names: the columns to select, if the frame has them. None: all columns.
        weighted: the features whose ids carry weights. A column `<feature>.weights` has the weights.

    Raises:
        InvalidRequest: two selected columns have the same name.
    """
    present = _column_names(frame) or []
    weights = {weights_column(name): name for name in weighted if name in present}
    feature_names = [name for name in present if name not in weights and (names is None or name in names)]
    for name in (*feature_names, *weights):
        if present.count(name) > 1:
            raise InvalidRequest(f"column {name!r}: expected one of this name, got {present.count(name)}")
    columns = {name: frame[name] for name in feature_names}
    for column, name in weights.items():
        if column in present:
            columns[name] = {"values": columns[name], "weights": frame[column]}
    return columns


def weights_column(feature: str) -> str:
    """The name of the column with the weights of a feature's ids."""
    return f"{feature}{_WEIGHTS}"


def _column_names(frame: Any) -> list[Any] | None:
    for library, kind, names in _FRAMES:
        module = sys.modules.get(library)
        if module is not None and isinstance(frame, getattr(module, kind, ())):
            return list(getattr(frame, names))
    return None
