"""Peer: Mosec, with its dynamic batching; raw bytes over HTTP."""

import os

import numpy as np
from arrays import Arrays, unpack
from model import Model
from mosec import Server, Worker


class Lookup(Worker):
    """Joins the requests that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model.from_environment()

    def deserialize(self, data: bytes) -> Arrays:
        return unpack(data, self.model.inputs)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()

    def forward(self, data: list[Arrays]) -> list[np.ndarray]:
        return self.model.together(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Lookup, num=1, max_batch_size=int(os.environ.get("BENCH_BATCH", "32")), max_wait_time=1)
    server.run()
