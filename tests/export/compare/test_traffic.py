"""What ranks send one another, counted."""

from pathlib import Path

import numpy as np

from export.commands.settings import read_tables
from export.compare.measure import traffic_between
from export.config import ExportConfig
from export.plan.sharding import Sharding
from export.prepare import describe
from export.trained.generated_checkpoint import generated_checkpoint


def test_traffic_is_what_ranks_send_one_another(tmp_path: Path) -> None:
    """Counted id by id and sum by sum, for a request whose ids are spread evenly."""
    (tmp_path / "t.toml").write_text("[tables.a]\nrows = 80\ndim = 8\npooling_factor = 20\n")
    trained, factors = read_tables(tmp_path / "t.toml")
    for kind in ("row_wise", "column_wise", "table_wise"):
        sharding = Sharding(ranks=4, types={"*": kind}, pooling_factors=factors, batch_size=16)
        manifest = describe(trained, ExportConfig(sharding=sharding), lambda: generated_checkpoint(trained))
        counted = np.zeros((4, 4))
        ids = np.arange(16 * 20).reshape(16, 20) % 80
        for sample, bag in enumerate(ids):
            home = sample // 4
            for shard in manifest.plan.shards:
                if shard.rank != home:
                    ids_of_shard = ((bag >= shard.rows[0]) & (bag < shard.rows[1])).sum()
                    counted[home, shard.rank] += 8 * ids_of_shard + 8
                    counted[shard.rank, home] += 4 * (shard.columns[1] - shard.columns[0])
        np.testing.assert_allclose(traffic_between(manifest, sharding), counted)
