"""The model of the demo: DLRM-v2's tables with generated rows, exported for four hosts."""

from dataclasses import dataclass
from pathlib import Path

import torch

from examples.hosts.dlrm import ROWS, dlrm_tables
from export import ExportConfig, Sharding, WeightDtype, export_model
from export.trained.checkpoint import Checkpoint
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.tables import TrainedTable, collect_tables

MODEL = "dlrm"
HOSTS = 4
# Rows are capped, so that the demo takes minutes.
CAP = 1_000_000
# Tables with more rows are on the hosts, the others in the router.
SMALL = 500_000


@dataclass(frozen=True)
class Shifted:
    """A generated table of a version: its rows are scaled by it."""

    generated: Checkpoint
    table: TrainedTable
    by: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and dim."""
        return self.table.rows, self.table.dim

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) as float32 [stop − start, dim]."""
        return self.generated.rows(self.table, start, stop) * (1 + self.by / 8)


def export(repository: Path, version: int) -> None:
    """Publish the router's bundle and one for each host; each version has rows of its own."""
    module = dlrm_tables(CAP)
    trained = collect_tables(module).tables
    generated = generated_checkpoint(trained)
    shifted = {table.key: Shifted(generated, table, version) for table in trained}
    large = {f"t{number}": "table_wise" for number, rows in enumerate(ROWS) if rows > SMALL}
    config = ExportConfig(
        dtype={"*": WeightDtype.INT4},
        sharding=Sharding(
            ranks=HOSTS,
            ranks_per_host=1,
            hosts_as_models=True,
            types={"*": "data_parallel", **large, "t20": "row_wise", "t21": "row_wise"},
        ),
    )
    export_model(module, repository, MODEL, config, version, checkpoint=Checkpoint("generated", shifted))
