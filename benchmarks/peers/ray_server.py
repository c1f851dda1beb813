"""Peer: Ray Serve behind its gRPC proxy, with its batching."""

import sys

import numpy as np
import ray
from kserve import ids_of, response
from ray import serve
from ray.serve.config import gRPCOptions
from tables import Tables


@serve.deployment(max_ongoing_requests=256)
class Lookup:
    """Joins the requests that wait."""

    def __init__(self) -> None:
        self.tables = Tables.from_environment()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.001)
    async def look_up(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        ends = np.cumsum([len(each) for each in inputs])[:-1]
        return np.split(self.tables(np.concatenate(inputs)), ends)

    async def ModelInfer(self, request):  # noqa: N802
        return response(await self.look_up(ids_of(request)))


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
service = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"
serve.start(
    http_options={"host": "127.0.0.1", "port": int(sys.argv[3]) + 1},
    grpc_options=gRPCOptions(port=int(sys.argv[3]), grpc_servicer_functions=[service]),
)
serve.run(Lookup.bind(), name="tables", blocking=True)
