"""How tables are to be placed on ranks: what a person asks of the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchrec.distributed.planner.types import ParameterConstraints

from export.errors import ConfigError
from export.machine import memory_here
from export.matching import check_patterns, last_match
from serving.plan import COLUMN_MULTIPLE, ShardingType

AUTO = "auto"
AUTO_SIMPLE = "auto-simple"
CHOICES = (AUTO, AUTO_SIMPLE, *(kind.value for kind in ShardingType))
# More than any machine has.
MOST_BYTES = 1 << 60
_RANGES = {
    "ranks": (1, 10_000),
    "ranks_per_host": (1, 10_000),
    "memory_bytes": (1, MOST_BYTES),
    "machine_bytes": (1, MOST_BYTES),
    "batch_size": (1, 2**31 - 1),
    "row_wise_over": (0, MOST_BYTES),
    "column_wise_over": (0, MOST_BYTES),
}
# Constraints that leave everything open.
_OPEN = ParameterConstraints()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Ranks, and how tables are cut and copied over them.

    Mappings go from a table's name, or a glob over names, to a setting; the last that matches counts.

    Attributes:
        ranks: how many, on all hosts together.
        ranks_per_host: how many each host has; all where None.
        memory_bytes: what one rank can hold. Where None, several ranks have equal parts of `machine_bytes`; one rank,
            or an explicit plan, has no limit: what does not fit is read from disk.
        machine_bytes: the memory that ranks share; by default what this machine has, or its control group allows.
        types: `auto` (TorchRec's planner chooses), `auto-simple` (below), or one of TorchRec's sharding types.
        constraints: TorchRec's own, by a table's name. What they leave open, the other settings fill in.
        pooling_factors: how many ids a bag has, on average.
        min_partition: how narrow a block of columns may be. Where None, TorchRec's planner decides for `auto`, and
            a table that is to be cut by columns gets a block for each rank (each host under grid_shard).
        batch_size: samples in a request.
        row_wise_over: `auto-simple` cuts tables with more rows than this row-wise,
        column_wise_over: else those with more columns than this column-wise, and leaves others whole.
        plan: a JSON file that says it all, as `tbe-export plan --json` prints it; then nothing else may be set but
            memory_bytes, pooling_factors and batch_size.
    """

    ranks: int = 1
    ranks_per_host: int | None = None
    memory_bytes: int | None = None
    machine_bytes: int = field(default_factory=memory_here)
    types: Mapping[str, str] = field(default_factory=dict)
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    pooling_factors: Mapping[str, float] = field(default_factory=dict)
    min_partition: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 512
    row_wise_over: int = 1_000_000
    column_wise_over: int = 256
    plan: Path | str | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            if (number := getattr(self, name)) is not None and not least <= number <= most:
                raise ConfigError(f"{name}: expected {least} to {most}, got {number}")
        if self.ranks % self.local_ranks:
            raise ConfigError(f"ranks_per_host: expected a divisor of {self.ranks} ranks, got {self.local_ranks}")
        for pattern, kind in self.types.items():
            if kind not in CHOICES:
                raise ConfigError(f"types {pattern!r}: expected one of {', '.join(CHOICES)}, got {kind!r}")
        for pattern, width in self.min_partition.items():
            if not 1 <= width <= MOST_BYTES or width % COLUMN_MULTIPLE:
                raise ConfigError(
                    f"min_partition {pattern!r}: expected a multiple of {COLUMN_MULTIPLE} columns, got {width}"
                )
        for pattern, factor in self.pooling_factors.items():
            if not 0 <= factor < 1e6:
                raise ConfigError(f"pooling_factors {pattern!r}: expected >= 0 and below 1000000, got {factor}")
        if self.plan is not None and (self.ranks > 1 or self.types or self.constraints or self.min_partition):
            raise ConfigError("plan: expected no ranks, types, constraints or min_partition beside it: it says them")

    @property
    def local_ranks(self) -> int:
        """Ranks on each host."""
        return self.ranks_per_host or self.ranks

    @property
    def rank_bytes(self) -> int:
        """What one of several ranks can hold."""
        return self.memory_bytes or max(1, self.machine_bytes // self.ranks)

    @property
    def hosts(self) -> int:
        """Hosts."""
        return self.ranks // self.local_ranks

    def pooling_factors_of(self, table: str, readers: int) -> list[float]:
        """How many ids a bag of `table` has, on average, for each of the features that read it."""
        given = self.constraints.get(table, _OPEN).pooling_factors
        return [last_match(self.pooling_factors, table, 1.0)] * readers if given == _OPEN.pooling_factors else given

    def check_tables(self, readers: Mapping[str, Sequence[str]]) -> None:
        """Compare what is set by table with the tables there are, and the features that read them.

        Raises:
            ConfigError: a pattern matches no table, or a constraint has another number of pooling factors than its
                table has features.
        """
        for setting in ("types", "constraints", "pooling_factors", "min_partition"):
            check_patterns(setting, getattr(self, setting), readers)
        for table, features in readers.items():
            factors = self.pooling_factors_of(table, len(features))
            if len(factors) != len(features):
                raise ConfigError(
                    f"constraints {table!r}: expected pooling_factors for its {len(features)} features "
                    f"({', '.join(features)}), got {len(factors)}"
                )
