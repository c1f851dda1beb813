"""What is compared, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from export.checkpoint import Checkpoint
from export.errors import ConfigError
from export.sharding import CHOICES
from export.tables import TrainedTable
from serving.bundle import WeightDtype

# Each table as this package's own recommendation has it.
MIXED = "mixed"
STRATEGIES = (*(each for each in CHOICES if not each.startswith("auto")), MIXED, "auto", "auto-simple")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What is compared.

    Attributes:
        trained: the tables.
        weights: their rows.
        pooling_factors: ids in a bag on average, by table.
        generated: whether the rows are made up.
    """

    trained: Sequence[TrainedTable]
    weights: Checkpoint
    pooling_factors: Mapping[str, float]
    generated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How it is compared: every strategy on every number of ranks in every dtype, for `seconds` each."""

    strategies: Sequence[str]
    ranks: Sequence[int]
    ranks_per_host: int | None
    memory_bytes: int | None
    dtypes: Sequence[WeightDtype]
    batch_size: int
    seconds: float

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise ConfigError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if min(self.ranks) < 2:
            raise ConfigError(f"ranks: expected 2 or more (one rank is always measured), got {min(self.ranks)}")
        for name in ("batch_size", "seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected > 0, got {getattr(self, name)}")
