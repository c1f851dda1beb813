"""Peer: LitServe, with its batching: it takes JSON, so requests travel in base64, and answers raw bytes."""

import base64
import sys

import litserve as ls
import numpy as np
from arrays import Arrays, unpack
from fastapi import Request, Response
from model import Model


class Lookup(ls.LitAPI):
    """Joins the requests that wait."""

    def setup(self, device: str) -> None:
        self.model = Model.from_environment()

    def decode_request(self, request: Request) -> Arrays:
        return unpack(base64.b64decode(request["data"]), self.model.inputs)

    def batch(self, inputs: list[Arrays]) -> list[Arrays]:
        return inputs

    def predict(self, inputs: list[Arrays]) -> list[np.ndarray]:
        return self.model.together(inputs)

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        return output

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(content=output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Lookup(max_batch_size=32, batch_timeout=0.001)
    ls.LitServer(api, accelerator="cpu", workers_per_device=1).run(
        host="127.0.0.1", port=int(sys.argv[3]), generate_client_file=False, log_level="warning"
    )
