"""What to export: dtype, id policy and error limit by table, and the dtype of the answer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from export.errors import ConfigError
from export.matching import check_patterns, last_match
from export.sharding import Sharding
from serving.bundle import DefaultRow, IdPolicy, OutputDtype, WeightDtype
from serving.settings import ServingSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """How tables are stored and answered.

    Each mapping goes from a table's name, or a glob over names, to a setting; the last that matches a table
    counts. Tables that none matches get `error`, no limit of their own, and INT8.

    Attributes:
        dtype: how rows are stored. A table with a `max_error` and no dtype gets the smallest that keeps to it.
        id_policy: what happens to ids outside [0, rows).
        max_error: largest |float − stored| of any element, absolute, in the units of the weights. Rounding
            alone is always bounded; this bounds it further.
        output_dtype: dtype of the pooled embeddings.
        sharding: the ranks, and how tables are placed on them; one rank by default.
        serving: how the model is served, all its versions alike. None takes the defaults for a new model, and
            leaves one that is there as it is.
    """

    dtype: Mapping[str, WeightDtype] = field(default_factory=dict)
    id_policy: Mapping[str, IdPolicy | DefaultRow] = field(default_factory=dict)
    max_error: Mapping[str, float] = field(default_factory=dict)
    output_dtype: OutputDtype = OutputDtype.FP32
    sharding: Sharding = field(default_factory=Sharding)
    serving: ServingSettings | None = None

    def __post_init__(self) -> None:
        for pattern, limit in self.max_error.items():
            if not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"max_error {pattern!r}: expected a finite number > 0, got {limit}")

    def dtype_of(self, table: str) -> WeightDtype | None:
        """How the rows of `table` are stored, if that was said."""
        return last_match(dict[str, WeightDtype | None](self.dtype), table, None)

    def id_policy_of(self, table: str) -> IdPolicy | DefaultRow:
        """What happens to ids outside `table`."""
        return last_match(dict[str, IdPolicy | DefaultRow](self.id_policy), table, IdPolicy.ERROR)

    def max_error_of(self, table: str) -> float | None:
        """The limit set for `table`, if any."""
        return last_match(dict[str, float | None](self.max_error), table, None)

    def check_patterns(self, tables: Iterable[str]) -> None:
        """Refuse a pattern that matches no table.

        Raises:
            ConfigError: naming the pattern and the tables there are.
        """
        names = list(tables)
        for setting in ("dtype", "id_policy", "max_error"):
            check_patterns(setting, getattr(self, setting), names)
