"""What is compared, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from export.checkpoint import Checkpoint
from export.errors import ConfigError
from export.sharding import CHOICES, Sharding
from export.tables import TrainedTable
from serving.bundle import WeightDtype

# Each table as this package's own recommendation has it.
MIXED = "mixed"
MOST_SECONDS = 3600
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

    def __post_init__(self) -> None:
        Sharding(pooling_factors=self.pooling_factors)  # it knows which can be


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
        if not 0 < self.seconds <= MOST_SECONDS:
            raise ConfigError(f"seconds: expected > 0 and at most {MOST_SECONDS}, got {self.seconds}")
        for ranks in self.ranks:
            self.sharding(ranks)

    def sharding(self, ranks: int) -> Sharding:
        """That many ranks, on one host where it has room for all.

        Raises:
            ConfigError: a number cannot be used.
        """
        on_one_host = self.ranks_per_host is not None and ranks <= self.ranks_per_host
        return Sharding(
            ranks=ranks,
            ranks_per_host=None if on_one_host else self.ranks_per_host,
            memory_bytes=self.memory_bytes,
            batch_size=self.batch_size,
        )
