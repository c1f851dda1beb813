"""The scores of a batch of rows, as a table, and which of its rows the model refuses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from serving.batch.columns import BatchColumns
from serving.batch.sources import Source
from serving.errors import InvalidRequest
from serving.requests.input_forms import Nulls

# Rows that are encoded and sent together.
BATCH_ROWS = 4096
# Called with the number of a row that the model refuses, and why. It raises, or the row is left out.
RefuseRow = Callable[[int, InvalidRequest], object]


@dataclass(frozen=True)
class BatchScores:
    """How a batch is scored.

    Attributes:
        source: where scores come from.
        columns: the inputs of the model, and what is carried over.
        nulls: what null lists and ids are, as in `serving.requests.encoding.encode`.
    """

    source: Source
    columns: BatchColumns
    nulls: Nulls

    def score(self, model: Any, first: int, batch: Any, refuse: RefuseRow) -> Iterator[Any]:
        """Score a batch. If the model refuses it, halve it until the refused rows are alone, and score the others.

        Args:
            model: an Engine or a LookupClient.
            first: the number of the batch's first row.
            batch: a pyarrow RecordBatch.
            refuse: called for each row that is refused.

        Yields:
            pyarrow Tables: the scores of consecutive rows, with the columns that are carried over.
        """
        try:
            answer = model.score(*self.columns.request(batch), nulls=self.nulls)
        except InvalidRequest as error:
            if batch.num_rows <= 1:
                refuse(first, error)
                return
            half = batch.num_rows // 2
            for start, rows in ((0, batch.slice(0, half)), (half, batch.slice(half))):
                yield from self.score(model, first + start, rows, refuse)
        else:
            yield self.table(batch, answer)

    def table(self, batch: Any, answer: Any) -> Any:
        """The scores of a batch, with the columns that are carried over.

        Raises:
            ServingError: the answer is of another version.
        """
        self.source.check_answer(answer)
        scores = answer.to_arrow()
        kept_columns = {name: batch.column(name) for name in self.columns.keep}
        return pa.table({**kept_columns, **{name: scores[name] for name in scores.column_names}})

    def table_without_rows(self, model: Any, schema: Any) -> Any:
        """The table of a batch without rows: its columns.

        Args:
            model: an Engine or a LookupClient.
            schema: pyarrow's, of the batch.
        """
        batch = pa.RecordBatch.from_pylist([], schema)
        return self.table(batch, model.score(*self.columns.request(batch), nulls=self.nulls))
