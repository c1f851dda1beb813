"""Whether a column's type can be an input at all. Otherwise, each of its rows would be refused on its own."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from serving.errors import ConfigurationError
from serving.requests.frames import weights_column

_IS_LIST: tuple[Callable[[Any], bool], ...] = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view,
    pa.types.is_large_list_view,
)  # fmt: skip
_IS_ENCODED = (pa.types.is_dictionary, pa.types.is_run_end_encoded)
# A column of the type "null" has nothing but nulls, which may be allowed.
_IS_INTEGER = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_null)
_IS_NUMBER = (*_IS_INTEGER, pa.types.is_floating)


def check_id_type(path: str, feature: str, column: str, kind: Any, *, needs_weights: bool) -> None:
    """Refuse a type whose values are no ids, such as text or floats.

    Args:
        path: the path of the file.
        feature: the name of the feature.
        column: the name of its column.
        kind: the type of the column, pyarrow's.
        needs_weights: whether the ids need weights that no other column has.

    Raises:
        ConfigurationError: the type is refused. The message names the file, the column and the feature.
    """
    items = _decoded(_unlisted(_decoded(kind)))
    has_weights = pa.types.is_struct(items) and {"id", "weight"} == {field.name for field in items}
    if has_weights or (not needs_weights and _is_any(_IS_INTEGER, items)):
        return
    expected = "integers or lists of integers"
    if needs_weights:
        expected = f"lists of structs with `id` and `weight`, or another column {weights_column(feature)!r},"
    raise ConfigurationError(
        f"{path}: column {column!r}: expected {expected} for the feature {feature!r}, got {kind}"
    )


def check_number_type(path: str, name: str, column: str, kind: Any) -> None:
    """Refuse a type that has no numbers, such as text.

    Args:
        path: the path of the file.
        name: the name of the dense input, or of a feature's weights.
        column: the name of the column.
        kind: the type of the column, pyarrow's.

    Raises:
        ConfigurationError: the type is refused. The message names the file, the column and the input.
    """
    items = _decoded(kind)
    while (items_of_list := _decoded(_unlisted(items))) != items:
        items = items_of_list
    if not _is_any(_IS_NUMBER, items):
        raise ConfigurationError(
            f"{path}: column {column!r}: expected numbers or lists of numbers for the input {name!r}, got {kind}"
        )


def _unlisted(kind: Any) -> Any:
    """The type of the items of lists; any other type itself."""
    return kind.value_type if _is_any(_IS_LIST, kind) else kind


def _decoded(kind: Any) -> Any:
    """The type of the values of a dictionary or of runs; any other type itself."""
    return kind.value_type if _is_any(_IS_ENCODED, kind) else kind


def _is_any(predicates: tuple[Callable[[Any], bool], ...], kind: Any) -> bool:
    return any(is_one(kind) for is_one in predicates)
