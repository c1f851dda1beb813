"""What operators see: the numbers are right, the dashboard's queries find them, and a page explains each."""

import json
import math
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser as promql
import pytest

from export import DefaultRow, ExportConfig, IdPolicy, Sharding, export_model
from serving.backend.metrics import SECONDS, Histogram
from serving.client import LookupClient
from serving.errors import InvalidRequest
from serving.model.settings import ServingSettings
from serving.server import Server, run_server
from serving.server.health_state import HealthState
from tests.support.hosts import MODEL, export_hosts, fleet
from tests.support.models import SUM, collection
from tests.support.servers import FREE, lens, metric, raw_request, row, scrape

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "lookup.json").read_text())


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tables a (features x and y, default row) and b (z, error), looked up a little of everything."""
    folder = tmp_path_factory.mktemp("counted")
    config = ExportConfig(
        id_policy={"a": DefaultRow(default_row=3), "b": IdPolicy.ERROR},
        serving=ServingSettings(weights_memory="live"),
    )
    export_model(collection(SUM), folder / "r", "m", config)
    with run_server(folder / "r", FREE, log=folder / "log") as server:
        with LookupClient(server.grpc, "m", 30) as client:
            client.lookup({"x": [[1, 2], [], [5]], "z": [[0], [1, 1], []]})
            client.lookup({"x": [[10**9, 2, -1]], "y": [[-7]]})
            for bad in ({"z": [[10**9, 5]]}, {"x": [[1]], "z": [[-1]]}):
                with pytest.raises(InvalidRequest):
                    client.lookup(bad)
            for values, lengths, features in (
                (row(1), lens(1), "nobody"),
                (row(1), lens(2), "x"),
                (row(1), lens(1, 1, 1), "x,z"),
                (row(1).reshape(1, 1, 1).repeat(2, 0)[:, 0], lens(1).repeat(2, 0), "x"),
            ):
                with pytest.raises(Exception, match="expected"):
                    raw_request(server, values, lengths, features, "m")
        yield server


@pytest.mark.usefixtures("first_scrape")
def test_default_row_is_read_in_place_of_ids_outside(counted: Server) -> None:
    with LookupClient(counted.grpc, "m", 30) as client:
        answer = client.lookup({"x": [[10**9, 2, -1]], "y": [[2**62]]})
        inside = client.lookup({"x": [[3, 2, 3]], "y": [[3]]})
    for name, rows in inside.items():
        assert rows.tolist() == answer[name].tolist()


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("tbe_calls_total", {}, 2),
        ("tbe_requests_total", {}, 2),
        ("tbe_samples_total", {}, 4),
        ("tbe_ids_total", {}, 6 + 4),
        ("tbe_empty_bags_total", {}, 2),
        ("tbe_ids_outside_total", {"table": "a"}, 3),
        ("tbe_ids_outside_total", {"table": "b"}, 2),
        ("tbe_rejected_total", {"reason": "ids"}, 2),
        ("tbe_rejected_total", {"reason": "features"}, 1),
        ("tbe_rejected_total", {"reason": "lengths"}, 2),
        ("tbe_rejected_total", {"reason": "shape"}, 1),
        ("tbe_rejected_total", {"reason": "size"}, 0),
        ("tbe_failed_total", {}, 0),
        ("tbe_shed_total", {}, 0),
        ("tbe_cancelled_total", {}, 0),
        ("tbe_call_requests_bucket", {"le": "1"}, 2),
        ("tbe_call_requests_bucket", {"le": "+Inf"}, 2),
        ("tbe_call_requests_sum", {}, 2),
        ("tbe_call_requests_count", {}, 2),
        ("tbe_request_seconds_bucket", {"le": "+Inf"}, 2),
        ("tbe_request_seconds_count", {}, 2),
        ("tbe_overflow_total", {}, 0),
        ("tbe_recoveries_total", {}, 0),
        ("tbe_captured_total", {}, 0),
        ("tbe_capture_dropped_total", {}, 0),
    ],
)
def test_requests_ids_and_refusals_are_counted(
    first_scrape: str, name: str, labels: dict[str, str], expected: float
) -> None:
    samples = [
        float(line.rpartition(" ")[2])
        for line in first_scrape.splitlines()
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items())
    ]
    assert samples == [expected]


@pytest.fixture(scope="module")
def first_scrape(counted: Server) -> str:
    return scrape(counted)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A router, looked up twice: each of its two hosts has half of a."""
    folder = tmp_path_factory.mktemp("routed")
    sharding = Sharding(ranks=2, ranks_per_host=1, types={"a": "row_wise", "b": "data_parallel"})
    router = export_hosts(folder, collection(SUM), ExportConfig(sharding=sharding))
    with fleet(folder, router) as served:
        with LookupClient(served.router.grpc, MODEL, 30) as client:
            client.lookup({"x": [[0, 49]]})
            client.lookup({"x": [[0]], "z": [[1]]})
        deadline = time.monotonic() + 60
        while "tbe_host_replicas_up{" not in scrape(served.router):  # it looks at its hosts now and then
            assert time.monotonic() < deadline, "replicas are not shown"
        yield served.router


@pytest.fixture(scope="module")
def pages(first_scrape: str, routed: Server) -> str:
    """The metrics of a model that has all ranks itself, of a router, and of a server with a certificate."""
    return (
        first_scrape
        + scrape(routed)
        + HealthState(
            certificate_expires=time.time(),
            store_read={"s3://bucket/models": time.time()},
            release_problems={"m": None},
        )
        .metrics()
        .decode()
    )


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("tbe_host_call_seconds_count", {"host": "0"}, 2),
        ("tbe_host_call_seconds_count", {"host": "1"}, 1),
        ("tbe_host_call_seconds_bucket", {"host": "0", "le": "+Inf"}, 2),
        ("tbe_host_bytes_total", {"host": "1", "direction": "in"}, 4 * 8),
        ("tbe_host_retries_total", {}, 0),
        ("tbe_host_timeouts_total", {}, 0),
        ("tbe_host_lost_total", {}, 0),
        ("tbe_host_replicas_up", {"host": "1"}, 1),
        ("tbe_lost_total", {}, 0),
        ("tbe_zeroed_total", {}, 0),
    ],
)
def test_calls_to_hosts_are_counted(routed: Server, name: str, labels: dict[str, str], expected: float) -> None:
    assert metric(routed, name, **labels) == expected


def test_requests_take_at_least_as_long_as_their_stages(first_scrape: str) -> None:
    def total(name: str) -> float:
        lines = [line for line in first_scrape.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    assert total("tbe_request_seconds_sum") >= total("tbe_stage_seconds_sum") > 0


def test_a_time_is_in_its_bucket_and_in_all_above() -> None:
    counts: dict[tuple[str, str], float] = defaultdict(float)

    def family(name: str) -> Any:
        def metric_of(labels: Mapping[str, str]) -> Any:
            def increment(value: float) -> None:
                counts[name, labels.get("le", "")] += value

            return SimpleNamespace(increment=increment)

        return SimpleNamespace(Metric=metric_of)

    times = Histogram(family("bucket"), family("count"), family("sum"), SECONDS, {"model": "m"})
    for seconds, number in ((0.0005, 1), (0.003, 2), (99.0, 1)):
        times.observe(seconds, number)
        times.publish()
    buckets = {le: count for (name, le), count in counts.items() if name == "bucket"}
    expected = {"0.0005": 1, "0.001": 1, "0.002": 1} | dict.fromkeys(
        ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"], 3
    )
    assert buckets == {**expected, "+Inf": 4}
    assert counts["count", ""] == 4
    assert counts["sum", ""] == pytest.approx(99.0065)


def test_each_stage_takes_time(counted: Server) -> None:
    for stage in ("check", "merge", "lookup", "split"):
        assert 0 < metric(counted, "tbe_stage_seconds_sum", stage=stage) < 60


def test_the_bundle_s_age_is_since_its_export(counted: Server) -> None:
    assert 0 < time.time() - metric(counted, "tbe_bundle_exported_timestamp_seconds") < 3600


def families(page: str) -> dict[str, str]:
    """Our metric families of a metrics page, and their types."""
    return dict(re.findall(r"^# TYPE (tbe_\w+) (\w+)$", page, re.MULTILINE))


# A histogram of Triton's takes one observation at a time. These are published as the counters that they are made of.
HISTOGRAMS = ("tbe_call_requests", "tbe_host_call_seconds", "tbe_request_seconds", "tbe_stage_seconds")
HISTOGRAM = {name + end: end for name in HISTOGRAMS for end in ("_bucket", "_sum", "_count")}


def test_metric_names_follow_the_prometheus_conventions(pages: str) -> None:
    """As `promtool check metrics` has it: counters end in _total, and the suffixes of histograms are theirs alone."""
    expected = {*HISTOGRAM}
    kinds = families(pages)
    assert {kinds.pop(name) for name in HISTOGRAM} == {"counter"}
    for name, kind in kinds.items():
        assert kind in ("counter", "gauge")
        assert name.endswith("_total") == (kind == "counter"), name
        assert not name.endswith(("_bucket", "_sum", "_count")), name
        expected.add(name)
    assert {name for name in series(pages) if name.startswith("tbe_")} == expected


# --- the dashboard


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def parsed(query: str) -> Any:
    return promql.parse(query.replace("$__rate_interval", "5m").replace("$model", f"m|{MODEL}"))


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector below a node."""
    if isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector
    for name in ("lhs", "rhs", "expr"):
        if (child := getattr(node, name, None)) is not None:
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def selectors_with_labels(node: Any) -> Iterator[Any]:
    """The selectors below a node whose labels an aggregation sees: `a and b` has those of a."""
    while isinstance(node, promql.AggregateExpr | promql.ParenExpr):
        node = node.expr
    is_filtered = isinstance(node, promql.BinaryExpr) and str(node.op) == "and"
    yield from selectors(node.lhs if is_filtered else node)


def grouped_by(node: Any) -> Iterator[tuple[Any, list[str]]]:
    """Every aggregation below a node, and the labels that it keeps."""
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        yield node, list(node.modifier.labels)
    for name in ("lhs", "rhs", "expr"):
        if (child := getattr(node, name, None)) is not None:
            yield from grouped_by(child)
    for child in getattr(node, "args", None) or ():
        yield from grouped_by(child)


def series(page: str) -> dict[str, list[dict[str, str]]]:
    """The labels of each series of a metrics page, by name."""
    by_name: dict[str, list[dict[str, str]]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        by_name.setdefault(name, []).append(dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    return by_name


@pytest.mark.parametrize("query", queries())
def test_every_query_of_the_dashboard_finds_its_series(pages: str, query: str) -> None:
    by_name = series(pages)
    tree = parsed(query)
    names = {selector.name for selector in selectors(tree)}
    assert names
    for selector in selectors(tree):
        assert selector.name in by_name, selector.name
        for matcher in re.findall(r'(\w+)=~"([^"]*)"', str(selector)):
            assert any(
                re.fullmatch(matcher[1], series_labels.get(matcher[0], ""))
                for series_labels in by_name[selector.name]
            )
    for aggregate, labels in grouped_by(tree):
        for selector in selectors_with_labels(aggregate):
            for series_labels in by_name[selector.name]:
                assert set(labels) <= set(series_labels), f"{selector.name} has no {set(labels) - set(series_labels)}"


def test_the_dashboard_shows_every_metric_of_ours(pages: str) -> None:
    ours = {name for name in series(pages) if name.startswith("tbe_")}
    shown = {selector.name for query in queries() for selector in selectors(parsed(query))}
    assert ours - shown == set()


def test_a_page_explains_every_metric_of_ours(pages: str) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in {name.removesuffix(HISTOGRAM.get(name, "")) for name in families(pages)}:
        assert f"| `{name}`" in page or f", `{name}` |" in page, name


def test_the_kernels_of_a_served_model_are_fast(pages: str) -> None:
    """Whatever the processor: the model's process loads torch in the order that lets FBGEMM see its instructions."""
    slow = [line for line in pages.splitlines() if line.startswith("tbe_slow_kernels{")]
    assert len(slow) >= 2  # of a model that has all ranks itself, and of a router
    for line in slow:
        assert line.endswith(" 0")
        assert re.search(r'instruction_set="(?!unknown)\w+"', line)


def test_the_formats_of_programs_are_labels(pages: str) -> None:
    programs = [line for line in pages.splitlines() if line.startswith("tbe_programs{")]
    assert len(programs) >= 2
    for line in programs:
        assert re.search(r'lookup="(torchscript|plain)"', line)
        assert re.search(r'scores="(torchscript|exported_program|)"', line)
        assert line.endswith(" 1")


def test_panels_of_served_versions_query_the_present() -> None:
    """Not of an hour: a version that was served in it would be shown as if it still were."""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "stat" and "version" in str(panel["targets"]):
            assert [target.get("instant") for target in panel["targets"]] == [True]


def test_queries_of_gauges_are_limited_to_served_versions() -> None:
    """Triton keeps those of a version that was unloaded."""
    gauges = {
        *("tbe_host_replicas", "tbe_host_replicas_up", "tbe_bundle_exported_timestamp_seconds"),
        *("tbe_weights_bytes", "tbe_weights_huge_bytes", "tbe_slow_kernels"),
    }
    names_of_queries = [{selector.name for selector in selectors(parsed(query))} for query in queries()]
    assert set().union(*names_of_queries) >= gauges
    assert all("tbe_serving_seconds_total" in names for names in names_of_queries if names & gauges)


def test_queries_of_the_bundle_age_are_limited_to_served_versions() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    expressions = [line for line in page.splitlines() if line.startswith("time() -")]
    expressions += [query for query in queries() if "exported" in query]
    assert len(expressions) == 2
    for query in expressions:
        names = {selector.name for selector in selectors(parsed(query))}
        assert names == {"tbe_bundle_exported_timestamp_seconds", "tbe_serving_seconds_total"}


@pytest.mark.long
@pytest.mark.usefixtures("first_scrape")
def test_an_unloaded_version_stops_counting_and_keeps_its_gauge(counted: Server, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "counted0" / "r"
    export_model(collection(SUM), folder, "m")
    counted.control(60).load("m")

    def served(version: str) -> float:
        return metric(counted, "tbe_serving_seconds_total", version=version)

    assert metric(counted, "tbe_bundle_exported_timestamp_seconds", version="1") > 0
    first, second = served("1"), served("2")
    assert second > 0
    assert served("1") == first
    assert served("2") > second


def test_an_unloaded_router_version_has_no_lost_hosts(routed: Server, pages: str) -> None:
    """Triton keeps what it said of them. The last test: the router is gone then."""
    assert "tbe_host_replicas_up{" in pages
    routed.control(30)._call(f"v2/repository/models/{MODEL}/unload", {})
    deadline = time.monotonic() + 60
    while not math.isnan(metric(routed, "tbe_host_replicas_up", host="1")):
        assert time.monotonic() < deadline, "it still counts"
        time.sleep(0.1)
    assert math.isnan(metric(routed, "tbe_host_replicas", host="0"))
    with urllib.request.urlopen(f"{routed.operations}/readyz?verbose", timeout=60) as answered:
        assert answered.read() == b"ready\n"
