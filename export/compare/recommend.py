"""Recommend a sharding type and a dtype for each table.

The sharding type follows from the table's bytes and traffic; the dtype follows from its error.
"""

from collections.abc import Mapping, Sequence

from rich.filesize import decimal

from export.compare.dtype_study import DtypeStudy
from export.compare.study import DtypeReport, Recommendation
from export.plan.sharding import Sharding
from export.plan.traffic import ID_BYTES, SUM_BYTES
from export.values import weight_dtype
from serving.bundle.plan import COLUMN_MULTIPLE, ShardingType
from serving.bundle.tables import Table

# A table with at most this share of a rank's bytes gets a copy on every rank.
_SMALL = 0.02
# The least cosine of float and stored rows that a recommended dtype has.
MIN_COSINE = 0.999


def recommend(
    tables: Sequence[Table],
    readers: Mapping[str, int],
    sharding: Sharding,
    dtypes: Mapping[str, Sequence[DtypeReport]],
) -> dict[str, Recommendation]:
    """A sharding type and a dtype for each table, with the reasons.

    Args:
        tables: the tables, in the dtype that is measured.
        readers: the number of features that read each table.
        sharding: the ranks, and the batch size and pooling factors of requests.
        dtypes: bytes and error of each table in each dtype.
    """
    share = sum(table.rows * table.row_bytes for table in tables) / sharding.ranks
    capacity = min(share, sharding.memory_bytes or share)
    advice = {}
    for table in tables:
        kind, reason = _recommend_type(table, readers[table.name], sharding, capacity)
        dtype, dtype_reason = _recommend_dtype(dtypes[table.name])
        advice[table.name] = Recommendation(
            sharding_type=kind.value, reason=reason, dtype=dtype, dtype_reason=dtype_reason
        )
    return advice


def recommend_dtypes(study: DtypeStudy, advice: Mapping[str, Recommendation]) -> dict[str, Recommendation]:
    """The dtypes that the AUC on labelled rows recommends, with the sharding types of `advice` if it has any."""
    return {
        table: Recommendation(
            dtype=dtype,
            dtype_reason=_reason_of_auc(study, table, dtype),
            sharding_type=advice[table].sharding_type if advice else "",
            reason=advice[table].reason if advice else "",
        )
        for table, dtype in study.recommended.dtypes.items()
    }


def _reason_of_auc(study: DtypeStudy, table: str, dtype: str) -> str:
    narrower = [(name, alone) for name, alone in study.tables[table].items() if _bits(name) < _bits(dtype)]
    if not narrower:
        return "the narrowest that was measured"
    name, alone = max(narrower, key=lambda measured: _bits(measured[0]))
    loss = alone.auc
    return f"with this table alone in {name}, AUC loses {loss.loss:.5f} ({loss.low:.5f} to {loss.high:.5f})"


def _bits(dtype: str) -> int:
    return weight_dtype("dtype", dtype).format.bits


def _recommend_type(table: Table, readers: int, sharding: Sharding, capacity: float) -> tuple[ShardingType, str]:
    size = table.rows * table.row_bytes
    if sharding.ranks == 1:
        return ShardingType.TABLE_WISE, "there is one rank"
    ids = sum(sharding.pooling_factors_of(table.name, readers))
    if size <= _SMALL * capacity:
        more = decimal(size * (sharding.ranks - 1))
        saved = sharding.batch_size * (ids * ID_BYTES + readers * table.dim * SUM_BYTES)
        return (
            ShardingType.DATA_PARALLEL,
            f"{decimal(size)} is little: copies on all ranks take {more} more, and save {decimal(int(saved))} of "
            "traffic per batch",
        )
    if size <= capacity:
        return (
            ShardingType.TABLE_WISE,
            f"{decimal(size)} fit into a rank's share of {decimal(int(capacity))}",
        )
    # Row-wise, every rank answers sums of all columns; column-wise, every rank is sent all ids.
    by_rows = ids * ID_BYTES + readers * table.dim * SUM_BYTES * sharding.ranks
    by_columns = ids * ID_BYTES * sharding.ranks + readers * table.dim * SUM_BYTES
    too_large = f"{decimal(size)} exceed a rank's share of {decimal(int(capacity))}: "
    if table.dim >= COLUMN_MULTIPLE * sharding.ranks and by_columns < by_rows:
        return (
            ShardingType.COLUMN_WISE,
            f"{too_large}by columns a sample moves {decimal(int(by_columns))}, by rows {decimal(int(by_rows))}",
        )
    if sharding.hosts > 1 and size <= capacity * sharding.local_ranks:
        return ShardingType.TABLE_ROW_WISE, f"{too_large}the ranks of one host hold it, and sums stay on that host"
    return (
        ShardingType.ROW_WISE,
        f"{too_large}by rows a sample moves {decimal(int(by_rows))}, by columns {decimal(int(by_columns))}",
    )


def _recommend_dtype(reports: Sequence[DtypeReport]) -> tuple[str, str]:
    for report in sorted(reports, key=lambda report: report.bytes):
        if report.cosine >= MIN_COSINE:
            return report.dtype, f"the smallest with cosine ≥ {MIN_COSINE}: {report.cosine:.5f}"
    widest = max(reports, key=lambda report: report.bytes)
    return widest.dtype, f"no compared dtype has cosine ≥ {MIN_COSINE}; this is closest: {widest.cosine:.5f}"
