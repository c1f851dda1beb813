"""What a study found: `study.json`, from which the report's page takes every number."""

import msgspec

from serving.bench.report import Figure

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
    """Tables placed by one strategy on so many ranks, in one dtype.

    A Figure is the median of rounds, with an interval that holds it as likely as `Study.confidence` says.

    Attributes:
        strategy: as `--strategy` takes it.
        ranks: how many.
        hosts: how many hosts they are on.
        dtype: the dtype of all tables, in small letters.
        error: why the tables cannot be placed so; then everything below is empty.
        sharding: the sharding type of each table.
        latency_s: a request to all ranks in one process, one after the other.
        latency_p99_s: 99 % of these requests took no longer.
        one_rank_s: the same request to the tables on one rank, asked in turn with it.
        over_one_rank: in each round, the placement's median ÷ one rank's.
        side_by_side_over_one_rank: the same ratio for `side_by_side_s`.
        split_s: median time to split a request by ranks.
        slowest_rank_s: median time of the rank that took longest.
        merge_s: median time to merge the ranks' sums.
        samples_per_s: samples that the one process answers.
        rank_bytes: for each rank, its stored bytes by table.
        traffic: for each rank, the bytes that it sends to each rank for one batch (`export.compare.traffic`).
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
        """Stored bytes of the fullest rank."""
        return max(sum(each.values()) for each in self.rank_bytes)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that all ranks send for one batch."""
        return sum(map(sum, self.traffic))


class Recommendation(msgspec.Struct, frozen=True):
    """The sharding type and dtype that suit a table, and why."""

    sharding_type: str
    reason: str
    dtype: str
    dtype_reason: str


class Verdict(msgspec.Struct, frozen=True):
    """The fastest strategies on so many ranks in one dtype.

    Attributes:
        ranks: how many.
        dtype: the dtype.
        measure: the figure of a placement that is compared: `over_one_rank` or `side_by_side_over_one_rank`.
        fastest: the strategy with the least median. After it come those whose intervals overlap its interval: the
            measurement cannot tell them from it.
    """

    ranks: int
    dtype: str
    measure: str
    fastest: list[str]


class Study(msgspec.Struct, frozen=True):
    """A whole study.

    Attributes:
        command: the command that made it.
        made_at: when, in seconds of Unix time.
        machine: CPU and cores.
        versions: versions of the packages that matter.
        batch_size: samples of each measured request; its ids are uniform.
        generated: whether the rows were made up (normal numbers). Then errors say nothing about a trained model.
        tables: the tables, by name.
        one_rank: the tables on one rank, by dtype.
        placements: every strategy on every number of ranks in every dtype.
        confidence: how likely an interval holds the median of all possible rounds.
        verdicts: the fastest of the placements that fit.
        recommended_ranks: the number of ranks that the recommendations are for.
        recommendations: what suits each table, by its name.
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
