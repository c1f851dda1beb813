"""Read all rows of the table `t` again and again until a delta is there, and print what was seen. It says "ready", and
"reading" once it has read some times.

    python -m tests.support.row_reader BUNDLE ROWS DELTAS

It imports no export: a process that does takes seconds to start.
"""

import json
import sys
import time

import numpy as np

from serving.engine import Engine
from serving.model.settings import WeightsMemory
from serving.requests.types import Embeddings

_PATIENCE_S, _SOME = 60.0, 10


def main(bundle: str, rows: str, last: str) -> None:
    """Read, and print what was seen: rows that were torn, and rows that were older than before."""
    ids = np.arange(int(rows))
    before: Embeddings = np.full(ids.size, -1.0, np.float32)
    reads = torn = backwards = 0
    deadline = time.monotonic() + _PATIENCE_S
    with Engine.open(bundle, memory=WeightsMemory.LIVE) as engine:
        print("ready", flush=True)
        while before.max() < int(last) and time.monotonic() < deadline:
            rows_read = engine.rows("t", ids)
            reads += 1
            if reads == _SOME:
                print("reading", flush=True)
            torn += int((rows_read != rows_read[:, :1]).any(axis=1).sum())
            backwards += int((rows_read[:, 0] < before).sum())
            before = rows_read[:, 0]
    print(json.dumps({"torn": torn, "backwards": backwards, "last": float(before.max())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
