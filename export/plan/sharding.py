"""What a person asks of the planner: ranks, and how tables are placed on them."""

import glob
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.patterns import check_patterns, last_match
from export.plan.captured_pooling import captured_pooling
from export.sizes import MOST_BYTES
from serving.arguments import check_argument, check_arguments
from serving.bundle.plan import COLUMN_MULTIPLE, ShardingType
from serving.bundle.tables import Feature
from serving.errors import ConfigurationError
from serving.machine_memory import memory_here

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints
else:
    ParameterConstraints = (
        object  # importing torchrec takes seconds; `_check_constraints` does it where there are any
    )

AUTO = "auto"
AUTO_SIMPLE = "auto-simple"
CHOICES = (AUTO, AUTO_SIMPLE, *(kind.value for kind in ShardingType))
# What a router's own rank can hold where nobody says. It is the same on every machine: hosts are others.
ROUTER_BYTES = 1_000_000_000
# What an explicit plan says itself.
_SAID_BY_A_PLAN = (
    "ranks",
    "ranks_per_host",
    "types",
    "constraints",
    "min_partition",
    "row_wise_over",
    "column_wise_over",
)


def _between(least: int, most: int, **default: Any) -> Any:
    """A number that has to lie in [least, most], unless it is None."""
    return field(metadata={"bounds": (least, most)}, **default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Ranks, and how tables are cut and copied over them.

    A mapping goes from a table's name, or a glob over names, to a setting. The last that matches a table counts.

    Attributes:
        ranks: number of ranks on all hosts together.
        ranks_per_host: ranks of each host; None puts all on one host.
        memory_bytes: what a rank can hold. Where None, several ranks have equal parts of `machine_bytes`. One rank,
            or an explicit plan, then has no limit: what does not fit is read from disk.
        machine_bytes: memory that all ranks share; with `hosts_as_models`, those of one host. By default it is this
            machine's, or what its control group allows.
        types: `auto` (TorchRec's planner chooses), `auto-simple` (see `row_wise_over`), or a sharding type of
            TorchRec.
        constraints: TorchRec's own constraints, by a table's name. The other settings fill in what they leave open.
        pooling_factors: average number of ids in a bag; or a list, one for each feature that reads the table.
        traffic: a file of captured requests (`serving.request.captured`). The pooling factors of tables that
            `pooling_factors` leaves out are measured in it.
        min_partition: least width of a block of columns. Where None, TorchRec's planner decides for `auto`; a table
            that is cut by columns gets a block for each rank, or for each host under grid_shard.
        batch_size: samples in a request.
        row_wise_over: `auto-simple` cuts a table with more rows than this row-wise.
        column_wise_over: `auto-simple` cuts another table with more columns than this column-wise. It leaves all
            other tables whole.
        plan: a JSON file with an explicit plan, as `tbe-export plan --json` prints it. Beside it, only memory_bytes,
            pooling_factors, traffic, batch_size, hosts_as_models and router_bytes may be set.
        hosts_as_models: each host answers as a model of its own, `<name>-host-<number>`, from any machine. The model
            itself becomes a router, which asks them.
        router_bytes: with `hosts_as_models`, what the router's own rank can hold. `auto` fills it with small and hot
            tables. Where None, this is `ROUTER_BYTES`; an explicit plan then has no limit.
        network_bytes_per_s: what the network between hosts carries, each way. TorchRec's figure where None.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    ranks: int = _between(1, 10_000, default=1)
    ranks_per_host: int | None = _between(1, 10_000, default=None)
    memory_bytes: int | None = _between(1, MOST_BYTES, default=None)
    machine_bytes: int = _between(1, MOST_BYTES, default_factory=memory_here)
    types: Mapping[str, str] = field(default_factory=dict)
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    pooling_factors: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    traffic: Path | str | None = None
    min_partition: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = _between(1, 2**31 - 1, default=512)
    row_wise_over: int = _between(0, MOST_BYTES, default=1_000_000)
    column_wise_over: int = _between(0, MOST_BYTES, default=256)
    plan: Path | str | None = None
    hosts_as_models: bool = False
    router_bytes: int | None = _between(0, MOST_BYTES, default=None)
    network_bytes_per_s: int | None = _between(1, MOST_BYTES, default=None)

    def __post_init__(self) -> None:
        check_arguments(self)
        _check_constraints(self.constraints)
        for each in fields(self):
            number = getattr(self, each.name)
            if "bounds" in each.metadata and number is not None:
                least, most = each.metadata["bounds"]
                if not least <= number <= most:
                    raise ConfigurationError(f"{each.name}: expected {least} to {most}, got {number}")
        if self.ranks % self.local_ranks:
            raise ConfigurationError(
                f"ranks_per_host: expected a divisor of {self.ranks} ranks, got {self.local_ranks}"
            )
        for pattern, kind in self.types.items():
            if kind not in CHOICES:
                raise ConfigurationError(f"types {pattern!r}: expected one of {', '.join(CHOICES)}, got {kind!r}")
        for pattern, width in self.min_partition.items():
            if not 1 <= width <= MOST_BYTES or width % COLUMN_MULTIPLE:
                raise ConfigurationError(
                    f"min_partition {pattern!r}: expected a multiple of {COLUMN_MULTIPLE} columns, got {width}"
                )
        for pattern, factors in self.pooling_factors.items():
            for factor in [factors] if isinstance(factors, int | float) else factors:
                if not 0 <= factor < 1e6:
                    raise ConfigurationError(
                        f"pooling_factors {pattern!r}: expected >= 0 and below 1000000, got {factor}"
                    )
        if self.plan is not None:
            default = Sharding()
            check_beside_plan([name for name in _SAID_BY_A_PLAN if getattr(self, name) != getattr(default, name)])
        if self.router_bytes is not None and not self.hosts_as_models:
            raise ConfigurationError("router_memory: expected hosts_as_models with it: only then there is a router")

    @property
    def local_ranks(self) -> int:
        """Ranks on each host."""
        return self.ranks_per_host or self.ranks

    @property
    def machine_ranks(self) -> int:
        """Ranks that share `machine_bytes`."""
        return self.local_ranks if self.hosts_as_models else self.ranks

    @property
    def rank_bytes(self) -> int:
        """What a rank can hold, where there are several."""
        return self.memory_bytes or max(1, self.machine_bytes // self.machine_ranks)

    @property
    def own_bytes(self) -> int | None:
        """What a router's own rank can hold; None where nothing limits it."""
        return ROUTER_BYTES if self.router_assumed else self.router_bytes

    @property
    def memory_assumed(self) -> bool:
        """Whether nobody said what a rank can hold, and it is taken to be its part of `machine_bytes`."""
        return self.memory_bytes is None and self.ranks > 1

    @property
    def router_assumed(self) -> bool:
        """Whether nobody said what the router's own rank can hold, and it is taken to be `ROUTER_BYTES`."""
        return self.hosts_as_models and self.router_bytes is None and self.plan is None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.local_ranks

    def pooling_factors_of(self, table: str, readers: int) -> list[float]:
        """The average number of ids in a bag, for each of the `readers` features that read `table`."""
        constraints = self.constraints.get(table)
        if constraints is not None and constraints.pooling_factors != type(constraints)().pooling_factors:
            given: list[float] = constraints.pooling_factors
            return given
        factors = last_match(self.pooling_factors, table, 1.0)
        return [factors] * readers if isinstance(factors, int | float) else list(factors)

    def measured(self, features: Sequence[Feature]) -> "Sharding":
        """The same, with the pooling factors of `traffic` in place of it. What `pooling_factors` says counts more.

        Args:
            features: of the model.

        Raises:
            ConfigurationError: the file cannot be read, or none of its requests is one to this model.
        """
        if self.traffic is None:
            return self
        by_feature = captured_pooling(Path(self.traffic), features)
        by_table: dict[str, list[float]] = {}
        for feature in features:
            by_table.setdefault(glob.escape(feature.table), []).append(by_feature[feature.name])
        return replace(self, traffic=None, pooling_factors=by_table | dict(self.pooling_factors))

    def check_tables(self, readers: Mapping[str, Sequence[str]]) -> None:
        """Refuse settings that do not fit the tables.

        Args:
            readers: the features of each table, by its name.

        Raises:
            ConfigurationError: a pattern matches no table, or a constraint has another number of pooling factors than
                its table has features.
        """
        for setting in ("types", "constraints", "pooling_factors", "min_partition"):
            check_patterns(setting, getattr(self, setting), readers)
        for table, features in readers.items():
            factors = self.pooling_factors_of(table, len(features))
            if len(factors) != len(features):
                raise ConfigurationError(
                    f"constraints {table!r}: expected pooling_factors for its {len(features)} features "
                    f"({', '.join(features)}), got {len(factors)}"
                )


def _check_constraints(constraints: Mapping[str, ParameterConstraints]) -> None:
    """Refuse constraints that are not TorchRec's."""
    if constraints:
        from torchrec.distributed.planner.types import ParameterConstraints as Kind

        check_argument("constraints", constraints, Mapping[str, Kind])


def check_beside_plan(given: Container[str]) -> None:
    """Refuse settings beside an explicit plan that says them itself.

    Args:
        given: names of fields of Sharding that somebody set, perhaps to their defaults.

    Raises:
        ConfigurationError: naming them.
    """
    if said := [name for name in _SAID_BY_A_PLAN if name in given]:
        raise ConfigurationError(f"plan: expected no {', '.join(said)} beside it: the plan file says that")
