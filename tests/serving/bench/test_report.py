"""What the numbers of a load say."""

import pytest

from serving.bench.generator import Repeat, Traffic
from serving.bench.report import Figure, costs, summarize


def test_a_report_has_the_median_and_the_extremes_of_repeats() -> None:
    runs = [
        Repeat(seconds=2, latencies_s=[1e-3 * speed] * 200, samples=800, ids=2400, busy=0.1) for speed in (1, 5, 2)
    ]
    report = summarize(Traffic(clients=4, rate=0, seconds=1, repeats=3, warm_up_s=0, check=0), 4, runs)
    assert report.answers_per_s == Figure(100, 100, 100)
    assert (report.samples_per_s.median, report.ids_per_s.median) == (400, 1200)
    assert report.latency_s["p50"] == Figure(0.002, 0.001, 0.005)
    assert report.latency_s["p50"].spread is None  # half of it is as much as the median
    assert Figure(0.002, 0.001, 0.003).spread == pytest.approx(0.5)
    assert Figure(0, 0, 9).spread is None
    assert report.latency_s.keys() == {"p50", "p90"}  # six answers beyond p99 say nothing
    assert report.confidence == 0.75


def test_costs_are_reported_per_million_samples() -> None:
    runs = [Repeat(seconds=2, latencies_s=[2e-3] * 2000, samples=8000, ids=1, busy=0.1)]
    report = summarize(Traffic(clients=4, rate=0, seconds=2, repeats=1, warm_up_s=0, check=0), 4, runs)
    # 4,000 samples a second are a million in 250 s.
    assert costs([report], 3.6) == "4 × 4, p99 2.00 ms: a million samples cost 0.2500"
    idle = summarize(
        Traffic(clients=4, rate=0, seconds=2, repeats=1, warm_up_s=0, check=0),
        None,
        [Repeat(seconds=2, latencies_s=[], samples=0, ids=0, busy=0.1)],
    )
    assert costs([idle], 3.6) == "4, unknown p99: a million samples cost unknown"
