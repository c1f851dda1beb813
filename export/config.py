"""What to export: dtype, id policy and error limit by table, and the dtype of the answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from export.errors import ConfigError
from serving.bundle import IdPolicy, OutputDtype, WeightDtype

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """How tables are stored and answered.

    Each mapping goes from a table's name, or a glob over names, to a setting; the last that matches a table
    counts. Tables that none matches get INT8, `error`, and no limit of their own.

    Attributes:
        dtype: how rows are stored.
        id_policy: what happens to ids outside [0, rows).
        max_error: largest |float − stored| of any element, absolute, in the units of the weights. Rounding
            alone is always bounded; this bounds it further.
        output_dtype: dtype of the pooled embeddings.
    """

    dtype: Mapping[str, WeightDtype] = field(default_factory=dict)
    id_policy: Mapping[str, IdPolicy] = field(default_factory=dict)
    max_error: Mapping[str, float] = field(default_factory=dict)
    output_dtype: OutputDtype = OutputDtype.FP32

    def __post_init__(self) -> None:
        for pattern, limit in self.max_error.items():
            if not limit > 0:
                raise ConfigError(f"max_error {pattern!r}: expected > 0, got {limit}")

    def dtype_of(self, table: str) -> WeightDtype:
        """How the rows of `table` are stored."""
        return _last_match(self.dtype, table, WeightDtype.INT8)

    def id_policy_of(self, table: str) -> IdPolicy:
        """What happens to ids outside `table`."""
        return _last_match(self.id_policy, table, IdPolicy.ERROR)

    def max_error_of(self, table: str) -> float | None:
        """The limit set for `table`, if any."""
        return _last_match(dict[str, float | None](self.max_error), table, None)

    def check_patterns(self, tables: Iterable[str]) -> None:
        """Refuse a pattern that matches no table: it is a typing error, not a wish.

        Raises:
            ConfigError: naming the pattern and the tables there are.
        """
        names = list(tables)
        for setting in ("dtype", "id_policy", "max_error"):
            for pattern in getattr(self, setting):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"{setting} {pattern!r}: expected the name of a table or a glob over names, "
                        f"matches none of {', '.join(names)}"
                    )


def _last_match(settings: Mapping[str, T], table: str, default: T) -> T:
    matching = [setting for pattern, setting in settings.items() if fnmatchcase(table, pattern)]
    return matching[-1] if matching else default
