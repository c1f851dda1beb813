"""Tables described in a TOML file, for a study without a model::

[tables.item]
rows = 1_000_000
dim = 64
pooling_factor = 20             # average number of ids in a bag; 1 by default
pooling = "mean"                # "sum" by default
features = ["item", "recent"]   # one feature with the table's name by default
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from export.commands.toml_file import read_toml
from export.sizes import MOST_BYTES
from export.trained.tables import TrainedTable
from serving.bundle.tables import Pooling
from serving.errors import ConfigurationError


class _TableKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows: int
    dim: int
    pooling_factor: float = 1.0
    pooling: str = "sum"
    features: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tables: dict[str, _TableKeys]


def read_tables(path: Path) -> tuple[tuple[TrainedTable, ...], Mapping[str, float]]:
    """Read a file.

    Returns:
        Its tables, and their pooling factors by name.

    Raises:
        ConfigurationError: the file cannot be read; or naming the table and key that is wrong.
    """
    described = read_toml(path, _File).tables
    if not described:
        raise ConfigurationError(f"{path}: expected a table such as [tables.item], found none")
    tables = tuple(_table(f"{path}: table {name!r}", name, keys) for name, keys in described.items())
    features = [feature for table in tables for feature in table.features]
    if twice := {feature for feature in features if features.count(feature) > 1}:
        raise ConfigurationError(f"{path}: feature {min(twice)!r}: expected one table that it reads, found several")
    return tables, {name: keys.pooling_factor for name, keys in described.items()}


def _table(where: str, name: str, keys: _TableKeys) -> TrainedTable:
    if keys.rows < 1 or keys.dim < 4 or keys.dim % 4 or keys.rows * keys.dim > MOST_BYTES:
        raise ConfigurationError(
            f"{where}: expected rows > 0 and a dim that is a multiple of 4, and no more than {MOST_BYTES} elements, "
            f"got {keys.rows} × {keys.dim}"
        )
    if not 0 < keys.pooling_factor < 1e6:
        raise ConfigurationError(
            f"{where}: pooling_factor: expected > 0 and below 1000000, got {keys.pooling_factor}"
        )
    pooling = {"sum": Pooling.SUM, "mean": Pooling.MEAN}.get(keys.pooling.lower())
    if pooling is None:
        raise ConfigurationError(f"{where}: pooling: expected sum or mean, got {keys.pooling!r}")
    return TrainedTable(
        name=name,
        key=name,
        rows=keys.rows,
        dim=keys.dim,
        pooling=pooling,
        weighted=False,
        features=keys.features or (name,),
        keys=keys.features or (name,),
    )
