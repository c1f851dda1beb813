"""Spans: where the time of a request goes, in the trace of its caller, through routers and hosts."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from export import ExportConfig, Sharding
from serving.backend.metrics import STAGES
from serving.backend.spans import Spans
from serving.client import LookupClient
from serving.client.connection import Connection
from serving.errors import InvalidRequest
from serving.model.settings import ServingSettings
from serving.requests.types import Tensors
from serving.router.calls import HostTime
from serving.router.host import TRACE
from tests.support.hosts import MODEL, export_hosts
from tests.support.models import Spec, collection
from tests.support.otlp import Seen, collecting
from tests.support.servers import running

SPECS = (Spec("item", 101, 8, "SUM", ("i",)), Spec("user", 99, 16, "MEAN", ("u",)))
# The timeout is so long that no host is asked twice on a busy machine.
CONFIG = ExportConfig(
    sharding=Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"}),
    serving=ServingSettings(shard_timeout_ms=60_000),
)
METHOD = "inference.GRPCInferenceService/ModelInfer"
SERVER, CLIENT, INTERNAL = 2, 3, 1


def servers(spans: list[Seen]) -> list[Seen]:
    return [span for span in spans if span.span.kind == SERVER]


def test_client_router_and_hosts_are_in_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_hosts(tmp_path, collection(SPECS), CONFIG)
    tracer = TracerProvider().get_tracer("a caller")
    with collecting() as collector:
        for name, value in (("TRACES_EXPORTER", "otlp"), ("EXPORTER_OTLP_ENDPOINT", collector.endpoint)):
            monkeypatch.setenv(f"OTEL_{name}", value)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms between two sendings
        with running(tmp_path / "r", "--local-hosts") as server, LookupClient(server.grpc, MODEL, 60) as client:
            client.lookup({"i": [[1]], "u": [[2]]})  # of no trace
            client.lookup({"i": [[1]], "u": [[2]]}, trace=f"00-{7:032x}-{7:016x}-00")  # its caller wants no span
            with tracer.start_as_current_span("a page") as caller:
                context = caller.get_span_context()
                client.lookup({"i": [[0, 100], [50]], "u": [[98, 1]]}, shared=["u"])
                with pytest.raises(InvalidRequest):
                    client.lookup({"i": [[1_000_000]], "u": [[2]]})
            spans = collector.of(f"{context.trace_id:032x}", lambda received: len(servers(received)) == 6)
            assert {span.span.trace_id.hex() for span in collector.all()} == {f"{context.trace_id:032x}"}
    assert {span.service for span in spans} == {"tbe-serving"}
    answered, refused = (
        next(
            server
            for server in servers(spans)
            if server.attributes.get("error.type") == error and is_of_router(server)
        )
        for error in (None, "IdsOutside")
    )
    for traced in (answered, refused):
        assert traced.span.name == METHOD
        assert traced.span.parent_span_id.hex() == f"{context.span_id:016x}"
    assert [value.string_value for value in answered.attributes["tbe.shared"].values] == ["u"]
    assert "tbe.shared" not in refused.attributes
    assert refused.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert (refused.span.status.code, answered.span.status.code) == (2, 0)
    assert "[0, 101)" in refused.span.status.message
    below = [span.span for span in spans if span.span.parent_span_id == answered.span.span_id]
    assert [traced.name for traced in below if traced.kind == INTERNAL] == ["queue", *STAGES]
    assert {traced.attributes[0].value.int_value for traced in below if traced.kind == CLIENT} == {0, 1}
    of_hosts = [traced for traced in below if traced.kind == SERVER]
    # Made by the hosts' own processes: each looks up a batch with a bag for each sample, and one that samples share.
    assert len(of_hosts) == 4
    for traced in below:
        assert answered.span.start_time_unix_nano <= traced.start_time_unix_nano <= traced.end_time_unix_nano
        # Two processes read one clock at two times.
        assert traced.end_time_unix_nano <= answered.span.end_time_unix_nano + 10_000_000
    stages = [traced for traced in below if traced.kind == INTERNAL]
    assert all(
        abs(before.end_time_unix_nano - after.start_time_unix_nano) < 1_000_000 for before, after in pairwise(stages)
    )


def test_the_page_has_all_attributes() -> None:
    root = Path(__file__).parents[3]
    code, page = (
        {*re.findall(r"\btbe\.[a-z_]+", (root / path).read_text())}
        for path in ("serving/backend/spans.py", "docs/logs.md")
    )
    assert code == page


@pytest.mark.parametrize("sampler", ["parentbased_always_on", "always_off"])
def test_the_sampler_of_the_server_can_drop_a_sampled_trace(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Spans.of_environment("m", "1") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console, otlp")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    spans = Spans.of_environment("m", "1")
    assert spans is not None
    nothing = Tensors(None, np.empty(0, np.int64), np.empty(0, np.int32))
    requests = [nothing, *(replace(nothing, trace=f"00-{7:032x}-{7:016x}-{flags}") for flags in ("00", "01"))]
    *without, last = spans.begin(requests, time.perf_counter())
    assert without == [None, None]
    assert (last is None) == (TRACE.get() is None) == (sampler == "always_off")
    spans.close()


def test_a_request_without_a_lookup_has_no_stages_and_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    spans = Spans("m", "1")
    exporter = InMemorySpanExporter()
    spans._provider.add_span_processor(SimpleSpanProcessor(exporter))
    request = Tensors(None, np.empty(0, np.int64), np.empty(0, np.int32), trace=f"00-{7:032x}-{7:016x}-01")
    now = time.perf_counter()
    before = [HostTime(0, now - 1, now)]  # of another request
    spans.end(spans.begin([request], now), now, [now], before, [InvalidRequest("no")])
    (only,) = exporter.get_finished_spans()
    assert (only.status.status_code, only.status.description) == (trace.StatusCode.ERROR, "no")


def test_a_client_sends_the_current_span_unless_a_trace_is_given() -> None:
    connection = Connection(addresses=["127.0.0.1:1"])
    assert connection.call_metadata(None) == []  # in no span
    traceparent = f"00-{7:032x}-{7:016x}-00"
    with TracerProvider().get_tracer("a caller").start_as_current_span("a page") as span:
        context = span.get_span_context()
        current = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert connection.call_metadata(None) == [("traceparent", current)]
        assert connection.call_metadata(traceparent) == [("traceparent", traceparent)]
        configured = Connection(addresses=["127.0.0.1:1"], metadata={"traceparent": traceparent})
        assert configured.call_metadata(None) == [("traceparent", traceparent)]


def is_of_router(traced: Seen) -> bool:
    return bool(traced.attributes["tbe.model"] == MODEL)


def test_opentelemetry_is_imported_only_on_demand() -> None:
    program = "import sys, serving.backend.answering, serving.client; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert not trace.get_current_span().get_span_context().is_valid
