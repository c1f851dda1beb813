"""Tables that exist only as numbers in a TOML file: rows, dim, pooling factor.

[tables.item]
rows = 1_000_000
dim = 64
pooling_factor = 20             # ids in a bag on average; 1 where it is left out
pooling = "mean"                # sum where it is left out
features = ["item", "recent"]   # one of the table's name where it is left out
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from export.errors import ConfigError
from export.sharding import MOST_BYTES
from export.tables import TrainedTable
from export.toml_file import read_toml
from serving.bundle import Pooling


class TableLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""

    rows: int
    dim: int
    pooling_factor: float = 1.0
    pooling: str = "sum"
    features: tuple[str, ...] = ()


class TablesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    tables: dict[str, TableLine]


def read_tables(path: Path) -> tuple[tuple[TrainedTable, ...], Mapping[str, float]]:
    """The tables of a file, and their pooling factors by name.

    Raises:
        ConfigError: naming the table and key that is wrong.
    """
    lines = read_toml(path, TablesFile).tables
    if not lines:
        raise ConfigError(f"{path}: expected a table such as [tables.item], found none")
    tables = tuple(_table(f"{path}: table {name!r}", name, line) for name, line in lines.items())
    features = [feature for table in tables for feature in table.features]
    if twice := {feature for feature in features if features.count(feature) > 1}:
        raise ConfigError(f"{path}: feature {min(twice)!r}: expected one table that it reads, found several")
    return tables, {name: line.pooling_factor for name, line in lines.items()}


def _table(where: str, name: str, line: TableLine) -> TrainedTable:
    if line.rows < 1 or line.dim < 4 or line.dim % 4 or line.rows * line.dim > MOST_BYTES:
        raise ConfigError(
            f"{where}: expected rows > 0 and a dim that is a multiple of 4, and no more than {MOST_BYTES} elements, "
            f"got {line.rows} × {line.dim}"
        )
    if not 0 < line.pooling_factor < 1e6:
        raise ConfigError(f"{where}: pooling_factor: expected > 0 and below 1000000, got {line.pooling_factor}")
    try:
        pooling = Pooling(line.pooling.upper())
    except ValueError as error:
        raise ConfigError(f"{where}: pooling: expected sum or mean, got {line.pooling!r}") from error
    return TrainedTable(
        name=name,
        key=name,
        rows=line.rows,
        dim=line.dim,
        pooling=pooling,
        weighted=False,
        features=line.features or (name,),
        keys=line.features or (name,),
    )
