"""Stored rows, cut anew: from the file of one rank into the files of another plan."""

import os
from pathlib import Path

import numpy as np

from export.rows.shard_files import write_rows
from serving.bundle.manifest import Manifest
from serving.bundle.weights import weights_path

_BLOCK_BYTES = 1 << 24


def recut_rows(source: Path, one_rank: Manifest, target: Path, manifest: Manifest) -> None:
    """Write the weights files of `manifest` into `target`.

    Args:
        source: the folder with the weights file of `one_rank`.
        one_rank: the same tables in the same dtypes, each whole on the only rank.
        target: a folder.
        manifest: the tables in the new plan.
    """
    stored = np.memmap(weights_path(source, one_rank, 0), np.uint8, mode="r")
    offsets = {shard.table: shard.offset_bytes for shard in one_rank.plan.shards}
    files = {
        number: os.open(weights_path(target, manifest, number), os.O_WRONLY | os.O_CREAT)
        for number in range(len(manifest.plan.ranks))
    }
    shards = manifest.plan.shards_by_table
    try:
        for table in manifest.tables:
            rows = stored[offsets[table.name] :][: table.rows * table.row_bytes].reshape(table.rows, -1)
            step = max(1, _BLOCK_BYTES // table.row_bytes)
            for start in range(0, table.rows, step):
                block = rows[start : start + step]
                write_rows(files, table, shards[table.name], start, block)
    finally:
        for file in files.values():
            os.close(file)
