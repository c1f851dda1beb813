"""What each dtype does to the rows of each table."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from export.compare.study import DtypeReport
from export.compare.tables import ComparedTables
from export.plan.sharding import Sharding
from export.rows.quantize import packs
from export.rows.store_blocks import store_rows
from export.trained.tables import TrainedTable
from serving.bundle.manifest import Agreement
from serving.bundle.rows import WeightDtype
from serving.bundle.weights import weights_paths


def measure_dtype_errors(tables: ComparedTables) -> dict[str, list[DtypeReport]]:
    """Store every table in every dtype that can hold it.

    Returns:
        For each table its dtypes, the narrowest first.

    Raises:
        CheckpointError, QuantizeError: a table cannot be stored.
    """
    found: dict[str, list[DtypeReport]] = {table.name: [] for table in tables.trained}
    for dtype in sorted(WeightDtype, key=lambda each: each.format.bits):
        held = [table for table in tables.trained if packs(table.dim, dtype)]
        agreements = _agreements(tables, held, dtype) if held else {}
        for table in held:
            agreement = agreements[table.name]
            found[table.name].append(
                DtypeReport(
                    dtype=dtype.value.lower(),
                    bytes=table.rows * dtype.row_bytes(table.dim),
                    largest_error=agreement.largest,
                    mean_error=agreement.mean,
                    cosine=agreement.cosine,
                )
            )
    return found


def _agreements(tables: ComparedTables, held: Sequence[TrainedTable], dtype: WeightDtype) -> dict[str, Agreement]:
    """How float and stored rows of the tables `held` agree."""
    manifest = tables.describe(dtype, Sharding(), of=held)
    with tempfile.TemporaryDirectory(prefix="tbe-compare-") as folder:
        stored = store_rows(weights_paths(Path(folder), manifest), held, manifest, tables.weights)
        return {each.table: each.error.tally.agreement for each in stored}
