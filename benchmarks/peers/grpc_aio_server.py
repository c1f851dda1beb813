"""Peer: a plain grpc.aio server around the model, with nothing between."""

import asyncio

import grpc.aio
from kserve import arrays_of, response
from model import Model
from tritonclient.grpc import service_pb2_grpc


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers one request at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model

    async def ModelInfer(self, request, context):  # noqa: N802
        return response(self.model.output, self.model(**arrays_of(request)))


async def main() -> None:
    model, port = Model.from_arguments()
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(model), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
