"""OpenTelemetry spans: how a request's time is spent in this process, in the trace of its caller.

They are made if `OTEL_TRACES_EXPORTER` is "otlp", for requests with a sampled `traceparent`. OpenTelemetry's other
variables set the destination, such as `OTEL_EXPORTER_OTLP_ENDPOINT`
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/). Without `OTEL_TRACES_EXPORTER`,
OpenTelemetry is not imported.

A request has a span of kind SERVER. Its children are a span for each stage, and in a router a span of kind CLIENT for
each call to a host, whose own SERVER span is in the same trace. Merged requests have the same stages. Names and
attributes: https://opentelemetry.io/docs/specs/semconv/rpc/rpc-spans/.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self

from serving.backend.metrics import STAGES
from serving.engine import Outcome
from serving.errors import ConfigurationError, ServingError, shown
from serving.requests.types import Tensors
from serving.router.calls import HostTime
from serving.router.host import TRACE

_SERVICE = "tbe-serving"
_METHOD = "inference.GRPCInferenceService/ModelInfer"
# The name of the time before the first stage: the requests of a handover are answered in turn.
_QUEUE = "queue"
# Longest wait for a collector when a version is unloaded, in seconds.
_SEND_S = 1.0
# A child of a request's span: name, kind, attributes, start and end by `perf_counter`.
_Part = tuple[str, Any, dict[str, Any], float, float]


class Spans:
    """Makes spans, and sends them from its own thread.

    Args:
        model, version: of the instance.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """

    def __init__(self, model: str, version: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigurationError(
                f"OTEL_TRACES_EXPORTER=otlp: {error}: install 'tbe-serving[server]', or set it to none"
            ) from error
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: _SERVICE}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(_SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._api: Any = trace
        self._about = {"rpc.system.name": "grpc", "rpc.method": _METHOD, "tbe.model": model, "tbe.version": version}

    @classmethod
    def of_environment(cls, model: str, version: str) -> Self | None:
        """Make spans if the environment enables them, otherwise return None. Errors as this class."""
        exporters = os.environ.get("OTEL_TRACES_EXPORTER", "").split(",")
        return cls(model, version) if "otlp" in map(str.strip, exporters) else None

    def close(self) -> None:
        """Send the remaining spans. An unreachable collector delays this by at most `_SEND_S`."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_SEND_S)

    def begin(self, requests: Sequence[Tensors], since: float) -> list[Any]:
        """Begin the spans of requests that are looked up together. Calls to hosts are children of the first span.

        Args:
            requests: as they were received.
            since: when Triton handed them over, by `perf_counter`.

        Returns:
            For each request its span, or None if it is not traced.
        """
        begun = [
            None if request.trace is None else self._begin(request, len(requests), since) for request in requests
        ]
        parent = next((span.get_span_context() for span in begun if span is not None), None)
        TRACE.set(None if parent is None else f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01")
        return begun

    def _begin(self, request: Tensors, together: int, since: float) -> Any:
        if not int(str(request.trace)[-2:], 16) & self._api.TraceFlags.SAMPLED:
            return None
        about: dict[str, Any] = {**self._about, "tbe.ids": request.values.size, "tbe.requests_together": together}
        if request.shared:
            about["tbe.shared"] = list(request.shared)
        context = self._propagator.extract({"traceparent": request.trace})
        kind = self._api.SpanKind.SERVER
        span = self._tracer.start_span(_METHOD, context, kind, about, start_time=_ns(since))
        return span if span.is_recording() else None  # OTEL_TRACES_SAMPLER may sample fewer than callers do

    def end(
        self,
        begun: Sequence[Any],
        since: float,
        times: Sequence[float],
        hosts: Iterable[HostTime],
        outcomes: Sequence[Outcome],
    ) -> None:
        """End spans, and add child spans for the stages and the calls to hosts.

        Args:
            begun: the result of `begin`.
            since: as for `begin`.
            times: the start of the first stage and the end of each [len(STAGES) + 1], by `perf_counter`. For requests
                that were not looked up: the time of their refusal [1].
            hosts: the calls of the last lookup.
            outcomes: of the requests.
        """
        if not any(begun):
            return
        kind = self._api.SpanKind
        parts: list[_Part] = []
        if len(times) > 1:
            stages = zip((_QUEUE, *STAGES), pairwise([since, *times]), strict=True)
            parts = [(name, kind.INTERNAL, {}, *stage) for name, stage in stages]
            parts += [(_METHOD, kind.CLIENT, {"tbe.host": host.host}, host.started, host.ended) for host in hosts]
        for span, outcome in zip(begun, outcomes, strict=True):
            if span is None:
                continue
            context = self._api.set_span_in_context(span)
            for name, of_kind, about, start, end in parts:
                self._tracer.start_span(name, context, of_kind, about, start_time=_ns(start)).end(_ns(end))
            if isinstance(outcome, ServingError):
                span.set_attribute("error.type", type(outcome).__name__)
                span.set_attribute("rpc.response.status_code", outcome.code)
                span.set_status(self._api.StatusCode.ERROR, shown(str(outcome)))
            span.end()


def _ns(seconds: float) -> int:
    """Convert a time of `perf_counter` to Unix time in ns."""
    return time.time_ns() - int(1e9 * (time.perf_counter() - seconds))
