"""Peer: Mosec, with its dynamic batching; raw bytes over HTTP."""

import os

import numpy as np
from mosec import Server, Worker
from tables import Tables


class Lookup(Worker):
    """Joins the requests that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables.from_environment()

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.int64).reshape(-1, self.tables.ids)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        ends = np.cumsum([len(each) for each in data])[:-1]
        return np.split(self.tables(np.concatenate(data)), ends)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Lookup, num=1, max_batch_size=int(os.environ.get("BENCH_BATCH", "32")), max_wait_time=1)
    server.run()
