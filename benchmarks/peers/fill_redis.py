"""Put every row that a request asks for into Redis: `table:id` → FP32 row.

    python fill_redis.py FOLDER PORT [HOST]

With the number of a host: only rows of its features, which `hosts.json` names.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import redis


def main(folder: Path, port: int, host: int | None) -> None:
    client = redis.Redis(port=port)
    end = time.monotonic() + 30
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    spec = json.loads((folder / "tables.json").read_text())
    requests = [np.load(path)["ids"].reshape(-1, sum(feature["ids"] for feature in spec["features"]))
             for path in folder.glob("requests_*.npz")]  # fmt: skip
    ids = np.concatenate(requests)
    start = 0
    features = range(len(spec["features"])) if host is None else json.loads((folder / "hosts.json").read_text())[host]
    for number, feature in enumerate(spec["features"]):
        table = feature["table"]
        columns = ids[:, start : start + feature["ids"]]
        start += feature["ids"]
        if number not in features:
            continue
        shape = spec["tables"][table]["rows"], spec["tables"][table]["dim"]
        rows = np.memmap(folder / f"{table}.fp32", np.float32, mode="r", shape=shape)
        unique_ids = np.unique(columns)
        for part in np.array_split(unique_ids, max(1, unique_ids.size // 2000)):
            client.mset({b"%d:%d" % (table, id_): rows[id_].tobytes() for id_ in part.tolist()})


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
