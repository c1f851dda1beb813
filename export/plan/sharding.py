"""The settings of a plan: ranks, and how tables are placed on them."""

import glob
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from export.values import MOST_BYTES
from serving.arguments import check_arguments
from serving.bundle.plan import COLUMN_MULTIPLE, ShardingType
from serving.bundle.tables import Feature, Table
from serving.errors import ConfigurationError, InvalidRequest
from serving.requests.captured import CapturedRequest, read_captured
from serving.requests.layout import lengths_by_key
from serving.requests.types import Lengths
from serving.tables.memory_budget import memory_limit

# The average of a feature that no captured request asks for.
_UNKNOWN = 1.0

T = TypeVar("T")


def last_match(settings: Mapping[str, T], table: str, default: T) -> T:
    """The setting of `table`, or `default` where no pattern matches."""
    matching = [setting for pattern, setting in settings.items() if fnmatchcase(table, pattern)]
    return matching[-1] if matching else default


def check_patterns(setting: str, patterns: Iterable[str], tables: Iterable[str]) -> None:
    """Refuse a pattern that matches no table: it is a typing error.

    Args:
        setting: the name of the setting, for the message.
        patterns: its patterns.
        tables: the names of all tables.

    Raises:
        ConfigurationError: naming the pattern and the tables there are.
    """
    names = list(tables)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"{setting} {pattern!r}: expected the name of a table or a glob over names, "
                f"matches none of {', '.join(names)}"
            )


AUTO = "auto"
AUTO_SIMPLE = "auto-simple"
_TYPES = tuple(kind.value for kind in ShardingType)
CHOICES = (AUTO, AUTO_SIMPLE, *_TYPES)
# The default memory of a router's own rank, in bytes. It is the same on every machine, unlike a host's.
ROUTER_BYTES = 1_000_000_000
# The settings that an explicit plan has itself.
_SAID_BY_A_PLAN = (
    "ranks",
    "ranks_per_host",
    "types",
    "min_partition",
    "row_wise_over",
    "column_wise_over",
)


def _between(least: int, most: int, **default: Any) -> Any:
    """A field for a number in [least, most], or None."""
    return field(metadata={"bounds": (least, most)}, **default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Ranks, and how tables are cut and copied over them.

    The keys of a mapping are names of tables, or globs over names. The last that matches a table counts.

    Attributes:
        ranks: number of ranks on all hosts together.
        ranks_per_host: ranks of each host. None: all are on one host.
        memory_bytes: the most bytes of a rank. None: several ranks have equal parts of `machine_bytes`; one rank, or
            an explicit plan, has no limit, and rows that do not fit are read from the disk.
        machine_bytes: memory that all ranks share. With `hosts_as_models`: that the ranks of one host share. Default:
            this machine's, or that of its control group.
        types: `auto` (TorchRec's planner chooses), `auto-simple` (see `row_wise_over`), or a sharding type of
            TorchRec; or several of these, among which TorchRec's planner chooses.
        pooling_factors: average number of ids in a bag; or a list, one for each feature that reads the table.
        traffic: a file of captured requests (`serving.requests.captured`). The pooling factors of tables that
            `pooling_factors` leaves out are measured in it.
        min_partition: least width of a block of columns. None: with `auto`, TorchRec's planner decides; otherwise a
            table that is cut by columns gets a block for each rank, or for each host under grid_shard.
        batch_size: samples in a request.
        row_wise_over: `auto-simple` cuts a table with more rows than this row-wise.
        column_wise_over: `auto-simple` cuts another table with more columns than this column-wise. It leaves all
            other tables whole.
        plan: a JSON file with an explicit plan, as `tbe-export plan --json` prints it. Beside it, only memory_bytes,
            pooling_factors, traffic, batch_size, hosts_as_models and router_bytes may be set.
        hosts_as_models: whether each host is a model of its own, `<name>-host-<number>`, on any machine. The model
            itself becomes a router, which asks them.
        router_bytes: with `hosts_as_models`, the most bytes of the router's own rank. `auto` fills it with small and
            hot tables. None: `ROUTER_BYTES`; with an explicit plan, no limit.
        network_bytes_per_s: bandwidth of the network between hosts, each way. None: TorchRec's figure.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    ranks: int = _between(1, 10_000, default=1)
    ranks_per_host: int | None = _between(1, 10_000, default=None)
    memory_bytes: int | None = _between(1, MOST_BYTES, default=None)
    machine_bytes: int = _between(1, MOST_BYTES, default_factory=memory_limit)
    types: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
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
        for option in fields(self):
            number = getattr(self, option.name)
            if "bounds" in option.metadata and number is not None:
                least, most = option.metadata["bounds"]
                if not least <= number <= most:
                    raise ConfigurationError(f"{option.name}: expected {least} to {most}, got {number}")
        if self.ranks % self.local_ranks:
            raise ConfigurationError(
                f"ranks_per_host: expected a divisor of {self.ranks} ranks, got {self.local_ranks}"
            )
        for pattern, choice in self.types.items():
            kinds, choices = ([choice], CHOICES) if isinstance(choice, str) else (choice or [""], _TYPES)
            if unknown := [kind for kind in kinds if kind not in choices]:
                raise ConfigurationError(
                    f"types {pattern!r}: expected one of {', '.join(choices)}, got {unknown[0]!r}"
                )
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
        """The most bytes of a rank, if there are several."""
        return self.memory_bytes or max(1, self.machine_bytes // self.machine_ranks)

    @property
    def own_bytes(self) -> int | None:
        """The most bytes of a router's own rank. None: no limit."""
        return ROUTER_BYTES if self.router_assumed else self.router_bytes

    @property
    def memory_assumed(self) -> bool:
        """Whether `memory_bytes` is not set, and a rank's limit is its part of `machine_bytes`."""
        return self.memory_bytes is None and self.ranks > 1

    @property
    def router_assumed(self) -> bool:
        """Whether `router_bytes` is not set, and the limit of the router's own rank is `ROUTER_BYTES`."""
        return self.hosts_as_models and self.router_bytes is None and self.plan is None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.local_ranks

    def types_of(self, table: Table) -> tuple[ShardingType, ...]:
        """The sharding types that `table` may have. TorchRec's planner chooses among several."""
        choice = last_match(self.types, table.name, AUTO)
        if choice == AUTO:
            return tuple(ShardingType)
        if choice != AUTO_SIMPLE:
            return tuple(map(ShardingType, [choice] if isinstance(choice, str) else choice))
        if table.rows > self.row_wise_over:
            return (ShardingType.ROW_WISE,)
        return (ShardingType.COLUMN_WISE if table.dim > self.column_wise_over else ShardingType.TABLE_WISE,)

    def pooling_factors_of(self, table: str, readers: int) -> list[float]:
        """The average number of ids in a bag, for each of the `readers` features that read `table`."""
        factors = last_match(self.pooling_factors, table, 1.0)
        return [factors] * readers if isinstance(factors, int | float) else list(factors)

    def measured(self, features: Sequence[Feature]) -> "Sharding":
        """These settings with measured pooling factors in place of `traffic`. Those in `pooling_factors` count more.

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
            ConfigurationError: a pattern matches no table, or a table has another number of pooling factors than
                features.
        """
        for setting in ("types", "pooling_factors", "min_partition"):
            check_patterns(setting, getattr(self, setting), readers)
        for table, features in readers.items():
            factors = self.pooling_factors_of(table, len(features))
            if len(factors) != len(features):
                raise ConfigurationError(
                    f"pooling_factors {table!r}: expected one for each of its {len(features)} features "
                    f"({', '.join(features)}), got {len(factors)}"
                )


def check_beside_plan(names: Container[str]) -> None:
    """Refuse settings beside an explicit plan that has them itself.

    Args:
        names: names of the fields of Sharding that were set, even to their defaults.

    Raises:
        ConfigurationError: naming them.
    """
    if named := [name for name in _SAID_BY_A_PLAN if name in names]:
        raise ConfigurationError(f"plan: expected no {', '.join(named)} beside it: the plan file says that")


def captured_pooling(path: Path, features: Sequence[Feature]) -> dict[str, float]:
    """The average number of ids in a bag of each feature, over the samples of the requests that ask for it.

    A request that the model cannot answer is left out: refused requests are captured too. So is one for rows. Ids
    that come once are divided by the samples that they count for: they are looked up once.

    Args:
        path: a file that serving captured.
        features: of the model.

    Returns:
        By the feature's name; 1 for a feature that no request asks for.

    Raises:
        ConfigurationError: the file cannot be read, or no line of it is a request to this model.
    """
    keys = list(dict.fromkeys(feature.key for feature in features))
    ids, bags = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
    requests = 0
    for request in read_captured(path, follow=True):
        requests += 1
        requested = keys if request.features is None else request.features
        lengths = _lengths(request, requested)
        if lengths is None or request.tables is not None or not set(requested) <= ids.keys():
            continue
        samples = max(key_lengths.size for key_lengths in lengths.values())
        for key, key_lengths in lengths.items():
            ids[key] += int(key_lengths.sum())
            bags[key] += samples
    if not any(bags.values()):
        raise ConfigurationError(
            f"traffic: {path}: expected requests for the keys {', '.join(keys)}, found none among {requests} requests"
        )
    average = {key: ids[key] / bags[key] if bags[key] else _UNKNOWN for key in keys}
    return {feature.name: average[feature.key] for feature in features}


def _lengths(request: CapturedRequest, keys: Sequence[str]) -> dict[str, Lengths] | None:
    """The bag sizes of a request by key, int32 [B] or [1]; None where they are wrong."""
    lengths = np.array(request.lengths, np.int32)
    if not keys or (lengths < 0).any() or int(lengths.sum()) != len(request.values):
        return None
    try:
        return lengths_by_key(request.tensors, keys)
    except InvalidRequest:
        return None
