"""Tables on several hosts, table by table, without a router: rows from Redis, or sums from Ray's actors.

`hosts.json` has the numbers of each host's features.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import redis
from arrays import Arrays
from redis_rows import Call, Redis


class RedisHosts(Redis):
    """One MGET to each Redis for the rows of its tables: all are sent, then all are read, and pooled here.

    That is faster than redis-py's pipelines and its asyncio client. `address` has all addresses, by commas.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = json.loads((folder / "hosts.json").read_text())

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Call]:
        with ExitStack() as stack:
            connections = []
            for host_address in address.split(","):
                host, _, port = host_address.rpartition(":")
                client = stack.enter_context(redis.Redis(host=host, port=int(port)))
                connections.append(client.connection_pool.get_connection())

            async def call(prepared: object) -> np.ndarray:
                keys, where, bags, samples = prepared
                for connection, key in zip(connections, keys, strict=True):
                    connection.send_command("MGET", *key)
                answers = [connection.read_response() for connection in connections]
                return self.pool([row for host, rows in where for row in answers[host][rows]], bags, samples)

            yield call

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        """Keys by host; where the rows of each feature are, in the features' order; bags."""
        flat, bags, samples = super().prepare(arrays, ours)
        bounds = np.cumsum([0, *(int(lengths.sum()) for _, lengths in bags)]).tolist()
        keys, where = [], {}
        for host, features in enumerate(self.hosts):
            host_keys: list[bytes] = []
            for feature in features:
                there = flat[bounds[feature] : bounds[feature + 1]]
                where[feature] = host, slice(len(host_keys), len(host_keys) + len(there))
                host_keys += there
            keys.append(host_keys)
        return keys, [where[feature] for feature in range(len(bags))], bags, samples


class RayRanks:
    """An actor for each host, which looks its tables up. They run on this machine, and nobody else asks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = json.loads((folder / "hosts.json").read_text())
        spec = json.loads((folder / "tables.json").read_text())
        ids = np.cumsum([0, *(feature["ids"] for feature in spec["features"])]).tolist()
        self.ids = [[slice(ids[n], ids[n + 1]) for n in features] for features in self.hosts]
        where = {}
        for host, features in enumerate(self.hosts):
            start = 0
            for feature in features:
                width = spec["tables"][spec["features"][feature]["table"]]["dim"]
                where[feature] = host, slice(start, start + width)
                start += width
        self.columns = [where[feature] for feature in range(len(where))]

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Call]:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Other candidates are to be asked by a process without these, which take seconds, and threads.
        import ray
        from tables import Tables

        ray.init(
            num_cpus=len(self.hosts), include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20
        )
        rank = ray.remote(num_cpus=1)(Tables)
        actors = [rank.remote(self.folder, "int8", features) for features in self.hosts]

        async def call(ids: object) -> np.ndarray:
            parts = [np.concatenate([ids[:, column] for column in columns], 1) for columns in self.ids]
            pending = [actor.__call__.remote(part) for actor, part in zip(actors, parts, strict=True)]
            sums = ray.get(pending)
            return np.concatenate([sums[host][:, columns] for host, columns in self.columns], 1)

        yield call
        ray.shutdown()

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        return arrays["ids"]

    def read(self, answer: np.ndarray, samples: int) -> np.ndarray:
        return answer
