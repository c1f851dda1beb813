"""What a study found. As JSON it is `study.json`, and every number of the report's page."""

import msgspec

from serving.load.report import Figure

_NONE = Figure(0.0, 0.0, 0.0)


class DtypeReport(msgspec.Struct, frozen=True):
    """A table stored as a dtype: bytes of all rows, |float − stored| at most and on average, and their cosine."""

    dtype: str
    bytes: int
    largest_error: float
    mean_error: float
    cosine: float


class TableStudy(msgspec.Struct, frozen=True):
    """A table, and what each dtype makes of it."""

    rows: int
    dim: int
    pooling_factor: float
    dtypes: list[DtypeReport]


class Placement(msgspec.Struct, frozen=True):
    """Tables placed by one strategy on so many ranks, in one dtype.

    A figure is a median of rounds with the interval that holds it, `Study.confidence`.

    Attributes:
        strategy: as `--strategy` takes it.
        error: why it cannot be; then everything below is empty.
        sharding: the sharding type of each table.
        latency_s: of a request to all ranks in one process, one after the other.
        latency_p99_s: what 99 % of them kept to.
        one_rank_s: of the same tables on one rank, called in turn with it.
        over_one_rank: of each round, the placement's median ÷ one rank's.
        side_by_side_over_one_rank: the same of the three steps together, as if ranks worked at once and the network
            took no time.
        split_s, slowest_rank_s, merge_s: medians of the three steps, the ranks' step being that of the slowest.
        samples_per_s: of the one process.
        rank_bytes: of each rank, by table.
        traffic: bytes from rank to rank for one batch, `export.compare.traffic`.
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
        """The latency if ranks worked at once and the network took no time."""
        return self.split_s + self.slowest_rank_s + self.merge_s

    @property
    def largest_rank_bytes(self) -> int:
        """What the fullest rank holds."""
        return max(sum(each.values()) for each in self.rank_bytes)

    @property
    def traffic_bytes(self) -> int:
        """All that moves between ranks for one batch."""
        return sum(map(sum, self.traffic))


class Recommendation(msgspec.Struct, frozen=True):
    """What suits a table, and why."""

    sharding_type: str
    reason: str
    dtype: str
    dtype_reason: str


class Verdict(msgspec.Struct, frozen=True):
    """Which strategies are fastest on so many ranks in one dtype, as far as the measurement can tell.

    Attributes:
        measure: the figure of a placement that it is about.
        fastest: the strategy with the least median, and after it those whose intervals overlap its own.
    """

    ranks: int
    dtype: str
    measure: str
    fastest: list[str]


class Study(msgspec.Struct, frozen=True):
    """All of it.

    Attributes:
        command: that made it; `made_at` in seconds of Unix time.
        machine: CPU and cores.
        batch_size: samples of the requests that were measured, with uniform ids.
        generated: whether the rows were made up (normal numbers), so that errors say nothing about a trained model.
        one_rank: the tables whole on one rank, by dtype.
        confidence: how likely it is that an interval holds the median of all rounds one could make.
        verdicts: which placements are fastest, of those that fit.
        recommended_ranks: how many ranks the recommendations are for, which go by bytes and traffic.
    """

    command: str
    made_at: float
    machine: str
    versions: dict[str, str]
    batch_size: int
    generated: bool
    tables: dict[str, TableStudy]
    one_rank: dict[str, Placement]
    placements: list[Placement]
    confidence: float
    verdicts: list[Verdict]
    recommended_ranks: int
    recommendations: dict[str, Recommendation]
