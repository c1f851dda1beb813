"""What a study measures, and what it found: `study.json`, from which the report's page takes every number."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from export.compare.dtype_study import DtypeStudy
from export.plan.sharding import CHOICES, Sharding
from serving.arguments import check_arguments
from serving.bench.report import Figure
from serving.bundle.formats import WeightDtype
from serving.errors import ConfigurationError

# The strategy that places each table as `export.compare.recommend` says.
MIXED = "mixed"
STRATEGIES = (*(choice for choice in CHOICES if not choice.startswith("auto")), MIXED, "auto", "auto-simple")
_MOST_SECONDS = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """A study measures every strategy on every number of ranks in every dtype.

    Attributes:
        strategies: of STRATEGIES.
        ranks: numbers of ranks, each 2 or more.
        ranks_per_host: ranks of each host. None: all are on one host.
        memory_bytes: memory of a rank. None: an equal part of this machine's memory.
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
        """The sharding options for a number of ranks, which are on one host if it can hold them all.

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


_NONE = Figure(0.0, 0.0, 0.0)


class DtypeReport(msgspec.Struct, frozen=True):
    """A table stored in a dtype.

    Attributes:
        dtype: the dtype, in small letters.
        bytes: stored bytes of all rows.
        largest_error: largest |float − stored| of an element.
        mean_error: mean |float − stored|.
        cosine: cosine of float and stored rows.
    """

    dtype: str
    bytes: int
    largest_error: float
    mean_error: float
    cosine: float


class TableStudy(msgspec.Struct, frozen=True):
    """A table, and its bytes and error in each dtype."""

    rows: int
    dim: int
    pooling_factor: float
    dtypes: list[DtypeReport]


class Placement(msgspec.Struct, frozen=True):
    """Tables placed by one strategy on some ranks, in one dtype.

    A Figure is the median of rounds, with an interval that holds the true median with `Study.confidence`.

    Attributes:
        strategy: one of `export.compare.measure.STRATEGIES`.
        ranks: number of ranks.
        hosts: number of their hosts.
        dtype: the dtype of all tables, in small letters.
        error: why the tables cannot be placed this way. If it is set, all attributes below are empty.
        sharding: the sharding type of each table.
        latency_s: a request to all ranks in one process, one after another.
        latency_p99_s: 99 % of these requests took no longer.
        one_rank_s: the same request to the tables on one rank, measured in turn with the placement.
        over_one_rank: in each round, the placement's median ÷ one rank's.
        side_by_side_over_one_rank: the same ratio for `side_by_side_s`.
        split_s: median time to split a request by ranks.
        slowest_rank_s: median time of the slowest rank's lookup.
        merge_s: median time to merge the ranks' sums.
        samples_per_s: samples a second of the one process.
        rank_bytes: for each rank, its stored bytes by table.
        traffic: for each rank, the bytes that it sends to each rank for one batch (`export.compare.measure`).
    """

    strategy: str
    ranks: int
    hosts: int
    dtype: str
    error: str | None = None
    sharding: dict[str, str] = {}
    latency_s: Figure = _NONE
    latency_p99_s: float = 0.0
    one_rank_s: Figure = _NONE
    over_one_rank: Figure = _NONE
    side_by_side_over_one_rank: Figure = _NONE
    split_s: float = 0.0
    slowest_rank_s: float = 0.0
    merge_s: float = 0.0
    samples_per_s: float = 0.0
    rank_bytes: list[dict[str, int]] = []
    traffic: list[list[int]] = []

    @property
    def side_by_side_s(self) -> float:
        """The latency if all ranks worked at once, and the network took no time."""
        return self.split_s + self.slowest_rank_s + self.merge_s

    @property
    def largest_rank_bytes(self) -> int:
        """Stored bytes of the fullest rank."""
        return max(sum(bytes_by_table.values()) for bytes_by_table in self.rank_bytes)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that all ranks send for one batch."""
        return sum(map(sum, self.traffic))


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The dtype and the sharding type that are recommended for a table, each with the reason.

    Attributes:
        dtype, dtype_reason: the dtype, and why.
        sharding_type, reason: the sharding type, and why. Empty: shardings were not measured.
    """

    dtype: str
    dtype_reason: str
    sharding_type: str = ""
    reason: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """The fastest strategies on one number of ranks, in one dtype.

    Attributes:
        ranks: number of ranks.
        dtype: the dtype.
        measure: the figure of a placement that is compared: `over_one_rank` or `side_by_side_over_one_rank`.
        fastest: the strategy with the least median, then those whose intervals overlap its interval: the measurement
            cannot tell them apart.
    """

    ranks: int
    dtype: str
    measure: str
    fastest: list[str]


class Study(msgspec.Struct, frozen=True):
    """A whole study.

    Attributes:
        command: the command that made it.
        made_at: Unix time in seconds.
        machine: CPU and cores.
        versions: versions of the packages that matter.
        batch_size: samples of each measured request. Its ids are uniform. None: shardings were not measured.
        generated: whether the rows are random (normal numbers). If so, errors say nothing about a trained model.
        tables: the tables, by name.
        one_rank: the tables on one rank, by dtype. Empty: shardings were not measured.
        placements: every strategy on every number of ranks in every dtype.
        confidence: how likely an interval holds the true median, in [0, 1].
        verdicts: the fastest of the placements without an error.
        recommended_ranks: the number of ranks that the recommendations are for. None: shardings were not measured.
        recommendations: by table.
        dtype_study: the AUC that dtypes cost. If it was measured, the recommended dtypes are by it.
    """

    command: str
    made_at: float
    machine: str
    versions: dict[str, str]
    batch_size: int | None
    generated: bool
    tables: dict[str, TableStudy]
    one_rank: dict[str, Placement]
    placements: list[Placement]
    confidence: float
    verdicts: list[Verdict]
    recommended_ranks: int | None
    recommendations: dict[str, Recommendation]
    dtype_study: DtypeStudy | None = None


IN_ONE_PROCESS = "over_one_rank"
SIDE_BY_SIDE = "side_by_side_over_one_rank"


def judge(placements: Sequence[Placement]) -> list[Verdict]:
    """The fastest placements for each number of ranks, dtype and measure.

    Placements with an error are left out.
    """
    groups: dict[tuple[int, str], list[Placement]] = {}
    for placement in placements:
        if placement.error is None:
            groups.setdefault((placement.ranks, placement.dtype), []).append(placement)
    return [
        Verdict(ranks=ranks, dtype=dtype, measure=measure, fastest=_fastest(group, measure))
        for (ranks, dtype), group in groups.items()
        for measure in (IN_ONE_PROCESS, SIDE_BY_SIDE)
    ]


def figure_of(placement: Placement, measure: str) -> Figure:
    """The figure of a placement that a verdict compares."""
    figure: Figure = getattr(placement, measure)
    return figure


def _fastest(placements: Sequence[Placement], measure: str) -> list[str]:
    best, *slower = sorted(placements, key=lambda placement: figure_of(placement, measure).median)
    limit = figure_of(best, measure).high
    return [
        best.strategy,
        *(placement.strategy for placement in slower if figure_of(placement, measure).low <= limit),
    ]
