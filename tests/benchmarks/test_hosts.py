"""Benchmarks of routers: what is worked out, what peers hold, and what the page says of a run."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers_hosts, routed
from benchmarks.measure import Result, ratio
from benchmarks.peer_servers import HERE
from benchmarks.peer_workload import PeerWorkload
from benchmarks.routed import Case
from export import Sharding
from serving.bundle.load import open_bundle

LATEST = Path(__file__).parents[2] / "benchmarks" / "results" / "latest.json"
HEADING = "## Ranks on other hosts"
TWO_HOSTS = Sharding(ranks=2, types={"*": "table_wise"}, hosts_as_models=True, ranks_per_host=1)


def values(results: Any) -> dict[str, float]:
    return {result.name: result.value for result in results}


def measured(case: Case, seconds: float = 1e-3) -> dict[str, Any]:
    """A run's results and ratios of a case, as `routed` writes them."""
    random = np.random.default_rng(case.hosts)
    results = []
    for samples, rounds in routed.ROUNDS.items():
        names = ["routed", "hop", "fan_out", "engine", "one_host", *(f"alone_{n}" for n in range(case.hosts))]
        times = {name: seconds * random.uniform(1, 2, rounds) for name in names}
        processor = routed.ProcessorTime(checks_split_merge=0.2 * seconds, calls=0.1 * seconds * case.hosts)
        results += [*routed.results(case, samples, times), *routed.apart(case, samples, times, processor)]
    results += [Result(f"routed_bytes_{case.name}_b128", 2.5e6, unit="B")]
    results += [ratio(f"routed_bytes_over_plan_{case.name}_b128", 1.01)]
    results += [Result(f"router_pss_{case.name}_bytes", 250e6, unit="B")]
    return {
        "results": {result.name: result.value for result in results if not result.is_ratio},
        "ratios": {result.name: result.value for result in results if result.is_ratio},
    }


def run_with(*added: dict[str, Any]) -> dict[str, Any]:
    """The last run, its results of routers and of peers on hosts replaced by these."""
    run: dict[str, Any] = json.loads(LATEST.read_text())
    ours = ("routed_", "hosts_engine_")
    run["results"] = {name: value for name, value in run["results"].items() if not name.startswith(ours)}
    for part in added:
        for kind, values_of_kind in part.items():
            run[kind] = run[kind] | values_of_kind
    return run


def section(run: dict[str, Any]) -> str:
    from benchmarks import document

    page = document.render(run, "run.json")
    return page[page.index(HEADING) :].partition("\n## ")[0]


def peers(redis: float, ray: float) -> dict[str, Any]:
    """Results of both peers: how many times as long as ours they took for one sample; for 128, four times."""
    figures: dict[str, dict[str, float]] = {"results": {}, "ratios": {}}
    for samples in (1, 128):
        figures["results"][f"hosts_engine_p50_b{samples}_s"] = 0.9e-3
        for name, times in (("redis_hosts", redis), ("ray_ranks", ray)):
            over = times if samples == 1 else 4.0
            figures["results"][f"routed_beside_{name}_p50_b{samples}_s"] = 1e-3
            figures["results"][f"{name}_p50_b{samples}_s"] = over * 1e-3
            figures["ratios"][f"{name}_over_routed_p50_b{samples}"] = over
    return figures


def test_times_on_separate_hosts_are_estimated_from_their_parts() -> None:
    times = {name: np.full(400, 1e-3) for name in ("routed", "hop")}
    times["alone_1"] = np.tile([3e-3, 1e-3], 200)
    times["alone_2"] = np.tile([1e-3, 5e-3], 200)  # the slowest of a round: 3 ms, 5 ms
    processor = routed.ProcessorTime(checks_split_merge=0.5e-3, calls=0.4e-3)
    figures = values(routed.apart(Case("table_wise", 2), 1, times, processor))
    assert figures["slowest_alone_table_wise_2_p50_b1_s"] == pytest.approx(4e-3)
    assert figures["other_calls_table_wise_2_b1_s"] == pytest.approx(0.2e-3)
    assert figures["apart_table_wise_2_p50_b1_s"] == pytest.approx(1e-3 + 0.5e-3 + 4e-3 + 0.2e-3)
    assert figures["apart_table_wise_2_p99_b1_s"] == pytest.approx(1e-3 + 0.5e-3 + 5e-3 + 0.2e-3)
    assert figures["routed_cpu_per_host_table_wise_2_b1_s"] == pytest.approx(0.45e-3)
    few = {name: seconds[:120] for name, seconds in times.items()}
    assert not any("p99" in name for name in values(routed.apart(Case("table_wise", 2), 128, few, processor)))


def test_each_feature_is_on_one_host_and_looked_up_there(tmp_path: Path, ragged: PeerWorkload) -> None:
    ragged.write(tmp_path / "rows", ["fp32"])
    router = open_bundle(ragged.export(tmp_path / "repository", sharding=TWO_HOSTS))
    hosts = peers_hosts.features_by_host(router)
    assert sorted(feature for features in hosts for feature in features) == [0, 1, 2]
    for host, features in zip(router.manifest.hosts, hosts, strict=True):
        part = open_bundle(router.path.parent.parent / host.model / str(host.version)).manifest
        rows = {ragged.rows[ragged.features[feature][0]] for feature in features}
        assert {table.rows for table in part.tables} == rows

    sys.path.insert(0, str(HERE))
    from tables import Tables  # type: ignore[import-not-found]

    saved = np.load(tmp_path / "rows" / "requests_5.npz")
    ids = np.split(saved["ids"][0], np.cumsum([width for _, width in ragged.features])[:-1], axis=1)
    columns = np.split(saved["answer"], np.cumsum([ragged.dims[table] for table, _ in ragged.features])[:-1], axis=1)
    for features in hosts:
        looked_up = Tables(tmp_path / "rows", "fp32", features)(np.concatenate([ids[n] for n in features], 1))
        np.testing.assert_allclose(looked_up, np.concatenate([columns[n] for n in features], 1), atol=1e-5)


def test_a_run_without_routers_has_no_section_of_them() -> None:
    from benchmarks import document

    assert HEADING not in document.render(run_with(), "run.json")


@pytest.mark.parametrize("cases", [routed.QUICK, routed.ALL], ids=["quick", "all"])
def test_the_page_has_every_case_that_was_measured(cases: tuple[Case, ...]) -> None:
    run = run_with(*map(measured, cases))
    said = section(run)
    for case in cases:
        rows = [line for line in said.splitlines() if line.startswith(f"| {case.kind} | {case.hosts} |")]
        assert len(rows) == 5  # two tables for each number of samples, and p99
    assert said.count("| table_wise |") == 5 * sum(case.kind == "table_wise" for case in cases)
    assert "Beside Redis" not in said


def test_the_page_shows_parts_that_add_up() -> None:
    case = Case("table_wise", 4)
    # Long enough for rounding to hide nothing.
    said = section(run_with(measured(case, seconds=5e-3)))
    lines = [line.split("|") for line in said.splitlines() if " + " in line and "**" in line]
    assert len(lines) == 2
    for line in lines:
        parts = [float(part.split()[0]) for part in line[3].split("+")]
        assert len(parts) == 4
        assert sum(parts) == pytest.approx(float(line[4].strip(" *").split()[0]), abs=0.06)


def test_tables_of_the_page_have_equal_columns_in_all_rows() -> None:
    said = section(run_with(*map(measured, routed.ALL), peers(0.2, 0.9)))
    lines = said.splitlines()
    for above, line in pairwise(lines):
        if line.startswith("|"):
            assert above == "" or above.count("|") == line.count("|"), (above, line)
        assert not (line.startswith("| table_wise") and above == "")


def test_the_page_names_the_servers_faster_than_a_router() -> None:
    said = section(run_with(measured(Case("table_wise", 4)), peers(redis=0.2, ray=2.0)))
    assert "* B = 1: redis by 5.00\n" in said
    assert "* B = 128" not in said
    assert "not first" not in section(run_with(measured(Case("table_wise", 4)), peers(redis=1.2, ray=2.0)))


def test_a_peer_that_cannot_be_started_is_absent(tmp_path: Path, ragged: PeerWorkload) -> None:
    def start() -> str:
        raise FileNotFoundError(".bench/peers could not be installed")

    (result,) = peers_hosts.run_beside(ragged, tmp_path, {}, "redis_hosts", start)
    assert (result.name, result.note) == ("redis_hosts_absent", ".bench/peers could not be installed")


def test_the_page_says_why_a_peer_is_absent() -> None:
    figures = peers(redis=0.2, ray=2.0)
    figures["ratios"] = {name: value for name, value in figures["ratios"].items() if "ray" not in name}
    said = section(
        run_with(measured(Case("table_wise", 4)), figures, {"absent": {"ray_ranks_absent": "no ray | here"}})
    )
    assert "| ray | absent: no ray / here |" in said


def test_the_figure_has_a_line_for_each_kind_of_call() -> None:
    from benchmarks import document

    run = run_with(*map(measured, routed.ALL))
    figure = document.draw_hosts(run["results"], routed.ALL)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        f"{samples}, {kind}" for samples in ("1 sample", "128 samples") for kind in ("table_wise", "row_wise")
    ]
    for axes, first in zip(figure.axes, [1, 2] * 2, strict=True):
        drawn = [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()]
        assert drawn == [[hosts for hosts in (1, 2, 4, 8) if hosts >= first]] * len(document.HOSTS_LINES)
        assert {text.get_text() for text in axes.texts} == {name for name, _ in document.HOSTS_LINES.values()}
