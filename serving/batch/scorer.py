"""Scores batches where another engine distributes them, such as Ray Data or Spark."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from serving.arguments import check_argument
from serving.batch.batch_scores import BATCH_ROWS, BatchScores
from serving.batch.columns import BatchColumns, OnError
from serving.batch.sources import BundleSource
from serving.errors import ConfigurationError, InvalidRequest
from serving.requests.input_forms import Nulls

_LOG = logging.getLogger(__name__)


class Scorer:
    """Scores batches of rows with a bundle, which each process opens once, for its first batch.

    Ray Data takes the class, Spark an object of it::

        rows.map_batches(Scorer, fn_constructor_args=("repository/ranker/1",), batch_format="pyarrow", concurrency=4)
        rows.mapInArrow(Scorer("repository/ranker/1"), "scores float")

    Args:
        bundle: its path, on every machine.
        columns: the column of each input that has another name there. A dense input may have several.
        keep: columns that are carried over to the scores.
        nulls: "refuse" nulls, or read null lists as "empty" ones and leave null ids out.
        on_error: "fail" at a row that the model refuses; or "skip" it: such a row has no scores, and is logged at
            WARNING with the reason.

    Raises:
        BundleError: the bundle cannot be opened.
        ConfigurationError: it has no scores, or they depend on the other samples of a request; or an argument is
            invalid.
    """

    def __init__(
        self,
        bundle: Path | str,
        *,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        keep: Sequence[str] = (),
        nulls: Nulls = "refuse",
        on_error: OnError = "fail",
    ) -> None:
        check_argument("columns", columns, Mapping[str, str | Sequence[str]] | None)
        check_argument("keep", keep, Sequence[str])
        for name, value, kind in (("nulls", nulls, Nulls), ("on_error", on_error, OnError)):
            if value not in get_args(kind):
                expected = " or ".join(map(repr, get_args(kind)))
                raise ConfigurationError(f"{name}: expected {expected}, got {value!r:.80}")
        self._source = source = BundleSource(Path(bundle))
        self._batch_scores = BatchScores(source, BatchColumns(source.inputs(), columns or {}, tuple(keep)), nulls)
        self._skips_bad_rows = on_error == "skip"

    def __call__(self, batch: Any) -> Any:
        """Score rows.

        Args:
            batch: a pyarrow Table or RecordBatch, as of Ray Data; or an iterator of RecordBatches, as of Spark.

        Returns:
            The same kind: a Table with a column for each output beside those that are kept; or an iterator of
            RecordBatches.

        Raises:
            InvalidRequest: naming a row of the batch that the model refuses, and why.
            ConfigurationError: a column is missing, or the batch is of another kind.
        """
        if isinstance(batch, pa.Table | pa.RecordBatch):
            return self._scored(batch)
        if isinstance(batch, Iterator):
            return self._scored_batches(batch)
        raise _not_arrow(batch)

    def _scored_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not isinstance(batch, pa.RecordBatch):
                raise _not_arrow(batch)
            yield from _with_lists(self._scored(batch)).to_batches()

    def _scored(self, batch: Any) -> Any:
        names = self._batch_scores.columns.of_file("the batch", batch.schema)
        model = _engine(self._source.path)
        rows = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        tables: list[Any] = []
        first = 0
        for record_batch in rows.select(names).to_batches(max_chunksize=BATCH_ROWS):
            tables += self._batch_scores.score(model, first, record_batch, self._refuse)
            first += record_batch.num_rows
        return pa.concat_tables(tables or [self._batch_scores.table_without_rows(model, batch.schema)])

    def _refuse(self, row: int, error: InvalidRequest) -> None:
        if not self._skips_bad_rows:
            raise InvalidRequest(f"row {row} of a batch: {error}", error.reason) from error
        _LOG.warning("row %d of a batch has no scores: %s", row, error)


def _not_arrow(batch: Any) -> ConfigurationError:
    return ConfigurationError(
        f"the batch: expected Arrow's rows, got {type(batch).__name__}: call Ray Data's map_batches with "
        'batch_format="pyarrow", and Spark\'s mapInArrow in place of mapInPandas'
    )


@cache
def _engine(path: Path) -> Any:
    """The Engine of this process for a bundle. Bundles do not change."""
    return BundleSource(path).open()


def _with_lists(table: Any) -> Any:
    """The table with lists of any length in place of lists of one length, which Spark does not have."""
    kinds = [pa.list_(kind.value_type) if pa.types.is_fixed_size_list(kind) else kind for kind in table.schema.types]
    return table.cast(pa.schema(dict(zip(table.column_names, kinds, strict=True))))
