"""Peer: LitServe, with its batching: it takes JSON, so ids travel in base64, and answers raw bytes."""

import base64
import sys

import litserve as ls
import numpy as np
from fastapi import Request, Response
from tables import Tables


class Lookup(ls.LitAPI):
    """Joins the requests that wait."""

    def setup(self, device: str) -> None:
        self.tables = Tables.from_environment()

    def decode_request(self, request: Request) -> np.ndarray:
        return np.frombuffer(base64.b64decode(request["ids"]), np.int64).reshape(-1, self.tables.ids)

    def batch(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return inputs

    def predict(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        ends = np.cumsum([len(each) for each in inputs])[:-1]
        return np.split(self.tables(np.concatenate(inputs)), ends)

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(content=output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Lookup(max_batch_size=32, batch_timeout=0.001)
    ls.LitServer(api, accelerator="cpu", workers_per_device=1).run(
        host="127.0.0.1", port=int(sys.argv[3]), generate_client_file=False, log_level="warning"
    )
