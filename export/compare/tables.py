"""The tables that a study compares."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from export.config import ExportConfig
from export.manifest import describe
from export.plan.sharding import Sharding
from export.trained.checkpoint import Checkpoint
from export.trained.tables import TrainedTable
from serving.bundle.manifest import Manifest
from serving.bundle.rows import WeightDtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTables:
    """Tables, and what requests ask of them.

    Attributes:
        trained: the tables.
        weights: the checkpoint that holds their rows.
        pooling_factors: average number of ids in a bag, by table; 1 where a table is missing.
        generated: whether the rows are made up.

    Raises:
        ConfigurationError: a pooling factor cannot be used.
    """

    trained: Sequence[TrainedTable]
    weights: Checkpoint
    pooling_factors: Mapping[str, float]
    generated: bool

    def __post_init__(self) -> None:
        Sharding(pooling_factors=self.pooling_factors)  # it checks them

    def pooling_factor_of(self, table: str) -> float:
        """Average number of ids in a bag of `table`."""
        return self.pooling_factors.get(table, 1.0)

    @property
    def pooling_factors_by_pattern(self) -> dict[str, float]:
        """The pooling factors as Sharding takes them, which reads names as globs."""
        return {glob.escape(name): factor for name, factor in self.pooling_factors.items()}

    def describe(self, dtype: WeightDtype, sharding: Sharding, of: Sequence[TrainedTable] | None = None) -> Manifest:
        """The manifest of the tables, or of some `of` them, in one dtype.

        Raises:
            ConfigurationError, QuantizeError, PlanError: as `export_model`.
        """
        config = ExportConfig(dtype={"*": dtype}, sharding=sharding)
        return describe(self.trained if of is None else of, config, lambda: self.weights)
