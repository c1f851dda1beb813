"""Peer: Ray Serve behind its gRPC proxy, with its batching."""

import sys

import numpy as np
import ray
from arrays import Arrays
from kserve import arrays_of, response
from model import Model
from ray import serve
from ray.serve.config import gRPCOptions


@serve.deployment(max_ongoing_requests=256)
class Lookup:
    """Joins the requests that wait."""

    def __init__(self) -> None:
        self.model = Model.from_environment()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.001)
    async def answer(self, requests: list[Arrays]) -> list[np.ndarray]:
        return self.model.together(requests)

    async def ModelInfer(self, request):  # noqa: N802
        return response(self.model.output, await self.answer(arrays_of(request)))


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
service = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"
serve.start(
    http_options={"host": "127.0.0.1", "port": int(sys.argv[3]) + 1},
    grpc_options=gRPCOptions(port=int(sys.argv[3]), grpc_servicer_functions=[service]),
)
serve.run(Lookup.bind(), name="tables", blocking=True)
