"""How far an export is, in bytes of float rows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.trained.tables import TrainedTable


@dataclass(frozen=True, slots=True)
class Progress:
    """An export works on `step`, and has done `done` of `total` bytes of float rows."""

    step: str
    done: int
    total: int


def float_bytes(*tables: "TrainedTable") -> int:
    """Bytes of all rows of `tables` in FP32."""
    return sum(4 * table.rows * table.dim for table in tables)
