"""A server that takes spans by OTLP over gRPC, as a collector does."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PATIENCE_S = 30.0


class Seen(NamedTuple):
    """A span that came: of the service whose process made it, with its attributes by name."""

    service: str
    span: Any

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what comes.

    Attributes:
        endpoint: as OTEL_EXPORTER_OTLP_ENDPOINT takes it.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Seen] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002  gRPC's own name
        with self._lock:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [Seen(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace: str, is_enough: Callable[[list[Seen]], bool] = lambda _: True) -> list[Seen]:
        """The spans of a trace by its id in hex, once they are as wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._lock:
                spans = [span for span in self._spans if span.span.trace_id.hex() == trace]
            if is_enough(spans):
                return spans
            assert time.monotonic() < deadline, [span.span.name for span in spans]
            time.sleep(0.05)

    def all(self) -> list[Seen]:
        with self._lock:
            return [*self._spans]


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this machine, in the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
