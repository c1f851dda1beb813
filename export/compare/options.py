"""What a study varies: strategies, ranks and dtypes."""

from collections.abc import Sequence
from dataclasses import dataclass

from export.plan.sharding import CHOICES, Sharding
from serving.arguments import check_arguments
from serving.bundle.rows import WeightDtype
from serving.errors import ConfigurationError

# The strategy that places each table as `export.compare.recommend` says.
MIXED = "mixed"
STRATEGIES = (*(each for each in CHOICES if not each.startswith("auto")), MIXED, "auto", "auto-simple")
_MOST_SECONDS = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """A study measures every strategy on every number of ranks in every dtype.

    Attributes:
        strategies: of STRATEGIES.
        ranks: numbers of ranks, each 2 or more.
        ranks_per_host: ranks of each host; all are on one host where None.
        memory_bytes: what a rank can hold; an equal part of this machine's memory where None.
        dtypes: the dtypes.
        batch_size: samples of a request.
        seconds: how long each placement is measured.

    Raises:
        ConfigurationError: one of them cannot be used.
    """

    strategies: Sequence[str]
    ranks: Sequence[int]
    ranks_per_host: int | None
    memory_bytes: int | None
    dtypes: Sequence[WeightDtype]
    batch_size: int
    seconds: float

    def __post_init__(self) -> None:
        check_arguments(self)
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise ConfigurationError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if min(self.ranks) < 2:
            raise ConfigurationError(
                f"ranks: expected 2 or more (one rank is always measured), got {min(self.ranks)}"
            )
        if not 0 < self.seconds <= _MOST_SECONDS:
            raise ConfigurationError(f"seconds: expected > 0 and at most {_MOST_SECONDS}, got {self.seconds}")
        for ranks in self.ranks:
            self.sharding(ranks)

    def sharding(self, ranks: int) -> Sharding:
        """So many ranks, on one host where it has room for all.

        Raises:
            ConfigurationError: a number cannot be used.
        """
        on_one_host = self.ranks_per_host is not None and ranks <= self.ranks_per_host
        return Sharding(
            ranks=ranks,
            ranks_per_host=None if on_one_host else self.ranks_per_host,
            memory_bytes=self.memory_bytes,
            batch_size=self.batch_size,
        )
