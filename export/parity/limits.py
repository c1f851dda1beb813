"""Refuse an export in which a table's numbers move further than they may."""

from collections.abc import Mapping

from export.errors import ParityError
from export.parity.answers import Answers
from export.rows.table_error import TableError
from serving.bundle.manifest import Manifest, Parity
from serving.bundle.tables import Table


def check_parity(
    manifest: Manifest, errors: Mapping[str, TableError], limits: Mapping[str, float | None], answers: Answers
) -> tuple[Parity, ...]:
    """The parity of every table.

    Args:
        manifest: features and tables.
        errors: of each table, float rows compared with stored ones.
        limits: of each table, `ExportConfig.max_error`. None: as far as rounding explains.
        answers: to one probe.

    Raises:
        ParityError: naming each table that moved too far, and at which step.
    """
    failures = answers.refusals(manifest)
    parity = []
    for table in manifest.tables:
        error = errors[table.name]
        limit = error.bound if (chosen := limits[table.name]) is None else chosen
        failures += _refusals(table, error, limit)
        parity.append(answers.parity(manifest, table, error.tally.agreement, limit))
    if failures:
        raise ParityError("\n".join(failures))
    return tuple(parity)


def _refusals(table: Table, error: TableError, limit: float) -> list[str]:
    """A line for each reason to refuse a table's stored rows."""
    refusals = []
    if error.unexplained_row is not None:
        refusals.append(f"table {table.name!r}: row {error.unexplained_row} moved further than rounding explains")
    if not error.tally.largest <= limit:  # NaN, too
        refusals.append(
            f"table {table.name!r}: {table.dtype.value} moves an element by {error.tally.largest:.3g}, "
            f"expected at most {limit:.3g}: store it as a wider dtype"
        )
    return refusals
