"""Rows from Redis, pooled by the client: what a feature store does."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import redis.asyncio
from arrays import Arrays

# What sends one prepared request and waits for its answer.
Call = Callable[[object], Awaitable[object]]


class Redis:
    """One MGET of a request's rows, pooled here: what a feature store does."""

    def __init__(self, folder: Path) -> None:
        self.spec = json.loads((folder / "tables.json").read_text())

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Call]:
        host, _, port = address.rpartition(":")
        client = redis.asyncio.Redis(host=host, port=int(port), max_connections=256)

        async def call(prepared: object) -> np.ndarray:
            keys, bags, samples = prepared
            return self.pool(await client.mget(keys), bags, samples)

        yield call
        await client.aclose()

    def prepare(self, arrays: Arrays, ours: bytes) -> object:
        ids = arrays["ids"]
        keys, bags, start = [], [], 0
        for feature in self.spec["features"]:
            table, width = feature["table"], feature["ids"]
            table_ids = ids[:, start : start + width]
            start += width
            there = table_ids < self.spec["tables"][table]["rows"] - 1  # the last row is padding
            keys += [b"%d:%d" % (table, id_) for id_ in table_ids[there].tolist()]
            bags.append((self.spec["tables"][table]["dim"], there.sum(1)))
        return keys, bags, len(ids)

    def pool(self, rows: list[bytes], bags: list, samples: int) -> np.ndarray:
        parts, start = [], 0
        for dim, lengths in bags:
            count = int(lengths.sum())
            numbers = np.frombuffer(b"".join(rows[start : start + count]), np.float32).reshape(count, dim)
            start += count
            sums = np.zeros((samples, dim), np.float32)
            has_ids = lengths > 0
            if count:
                firsts = (np.cumsum(lengths) - lengths)[has_ids]
                sums[has_ids] = np.add.reduceat(numbers, firsts)
            parts.append(sums)
        return np.concatenate(parts, 1)

    def read(self, answer: np.ndarray, samples: int) -> np.ndarray:
        return answer
