"""Peer: a plain grpc.aio server around the tables, with nothing between."""

import asyncio

import grpc.aio
from kserve import ids_of, response
from tables import Tables
from tritonclient.grpc import service_pb2_grpc


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers one request at a time."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    async def ModelInfer(self, request, context):  # noqa: N802
        return response(self.tables(ids_of(request)))


async def main() -> None:
    tables, port = Tables.from_arguments()
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(tables), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
