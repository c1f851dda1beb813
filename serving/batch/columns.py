"""Which columns of a file are the inputs of a model, and which are carried over to its scores."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from serving.errors import ConfigurationError, quoted
from serving.files import read_file
from serving.requests.frames import weights_column

# What happens to a row that the model refuses.
OnError = Literal["fail", "skip"]


class ModelInputs(NamedTuple):
    """What a model is scored from, and its scores.

    Attributes:
        keys: the features.
        weighted: the features whose ids have weights.
        dense: the dense inputs.
        outputs: the outputs, each with its key if it has a row for each id of that key.
    """

    keys: tuple[str, ...]
    weighted: tuple[str, ...]
    dense: tuple[str, ...]
    outputs: Mapping[str, str | None]


class BatchColumns:
    """Which columns of a file are inputs of the model, and which are kept.

    Args:
        inputs: of the model.
        names: the column of each input that is called otherwise in the files: of a feature, of its weights
            (`<feature>.weights`) or of a dense input, which may be several columns side by side.
        keep: the columns that are carried over.

    Raises:
        ConfigurationError: a name is no input of the model, or a column is carried over twice, or as an output.
    """

    def __init__(self, inputs: ModelInputs, names: Mapping[str, str | Sequence[str]], keep: Sequence[str]) -> None:
        weights = [weights_column(key) for key in inputs.weighted]
        if unknown := [name for name in names if name not in (*inputs.keys, *weights, *inputs.dense)]:
            expected = quoted((*inputs.keys, *weights, *inputs.dense))
            raise ConfigurationError(f"columns: {unknown[0]!r}: expected an input of the model, one of {expected}")
        for name, column in names.items():
            if not isinstance(column, str) and name not in inputs.dense:
                raise ConfigurationError(f"columns: {name!r}: expected one column: only a dense input has several")
        for column in keep:
            if column in inputs.outputs or keep.count(column) > 1:
                what = "an output of the model has this name" if column in inputs.outputs else "it is named twice"
                raise ConfigurationError(f"keep: {column!r}: expected another column: {what}")
        self.inputs = inputs
        self.keep = keep
        self._names = names

    def of_file(self, path: str, schema: Any) -> list[str]:
        """The columns to read of a file.

        Args:
            path: of the file.
            schema: its pyarrow Schema.

        Raises:
            ConfigurationError: naming the column that the file lacks, or has twice, or whose type no input can have.
        """
        from serving.batch.input_types import check_id_type, check_number_type  # needs pyarrow

        weights = [
            name
            for key in self.inputs.weighted
            if (name := weights_column(key)) in self._names or name in schema.names
        ]
        columns = []
        for name in (*self.inputs.keys, *self.inputs.dense, *weights):
            for column in self._columns_of(name):
                self._expect_column(path, schema, column, f"the input {name!r}: name another in `columns`")
                kind = schema.field(column).type
                if name in self.inputs.keys:
                    needs_weights = name in self.inputs.weighted and weights_column(name) not in weights
                    check_id_type(path, name, column, kind, needs_weights=needs_weights)
                else:
                    check_number_type(path, name, column, kind)
                columns.append(column)
        for column in self.keep:
            self._expect_column(path, schema, column, "`keep`")
        return [*dict.fromkeys([*columns, *self.keep])]

    def request(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The features and the dense inputs in a pyarrow RecordBatch."""
        features: dict[str, Any] = {key: batch.column(self._columns_of(key)[0]) for key in self.inputs.keys}
        for key in self.inputs.weighted:
            (column,) = self._columns_of(weights_column(key))
            if column in batch.schema.names:
                features[key] = {"values": features[key], "weights": batch.column(column)}
        dense = {}
        for name in self.inputs.dense:
            columns = self._columns_of(name)
            dense[name] = batch.column(columns[0]) if len(columns) == 1 else batch.select(columns)
        return features, dense

    def _columns_of(self, name: str) -> list[str]:
        column = self._names.get(name, name)
        return [column] if isinstance(column, str) else [*column]

    def _expect_column(self, path: str, schema: Any, column: str, what_for: str) -> None:
        if (count := schema.names.count(column)) != 1:
            got = f"{count} of this name" if count else f"the columns {quoted(schema.names)}"
            raise ConfigurationError(f"{path}: expected a column {column!r} for {what_for}, got {got}")


def read_column_names(path: Path | None) -> dict[str, str | list[str]]:
    """A TOML file with lines such as `item_id = "item"` and `dense_features = ["age", "price"]`.

    Raises:
        ConfigurationError: it is another file.
        OSError: it cannot be read.
    """
    if path is None:
        return {}
    try:
        names: dict[str, Any] = tomllib.loads(read_file(path, follow=True).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: expected TOML: {error}") from error
    for name, column in names.items():
        if not isinstance(column, str) and not (_is_list_of_text(column) and column):
            raise ConfigurationError(f"{path}: {name}: expected a column, or a list of columns, got {column!r:.80}")
    return names


def _is_list_of_text(column: Any) -> bool:
    return (
        isinstance(column, Collection)
        and not isinstance(column, Mapping)
        and all(isinstance(name, str) for name in column)
    )
