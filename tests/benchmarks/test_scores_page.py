"""What docs/benchmarks.md says of scores and sequences."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers_scores
from benchmarks.measure import Result, ratio
from benchmarks.peer_workload import MODEL
from benchmarks.peers_scores import LOADS, SERVERS
from benchmarks.peers_served import NOTHING, figures
from benchmarks.sequences import ROUNDS
from tests.benchmarks.test_scores import line

LATEST = Path(__file__).parents[2] / "benchmarks" / "results" / "latest.json"


def run_with(results: list[Result]) -> dict[str, Any]:
    """The last run, its results of scores and sequences replaced by these."""
    run: dict[str, Any] = json.loads(LATEST.read_text())
    for kind in ("results", "ratios", "absent", "spreads"):
        prefixes = (
            "scores_",
            "sequences_",
            "repeated_over_once_",
            "rank_",
            "user_side_",
            "best_peer_over_ours_rank_",
        )
        run[kind] = {name: value for name, value in run[kind].items() if not name.startswith(prefixes)}
    run["results"] |= {result.name: result.value for result in results if not result.is_ratio and not result.note}
    run["ratios"] |= {result.name: result.value for result in results if result.is_ratio}
    run["absent"] |= {result.name: result.note for result in results if result.note}
    return run


def section(run: dict[str, Any], heading: str = "### Scores beside other servers") -> str:
    """A section of the page, whose tables have as many cells in each row."""
    from benchmarks import document

    page = document.render(run, "run.json")
    text = page[page.index(heading) :].partition("\n## ")[0].partition("\n### ")[0]
    for above, below in pairwise(text.splitlines()):
        assert not below.startswith("|") or above == "" or above.count("|") == below.count("|"), (above, below)
    return text


def beside_others(seconds: dict[str, float], absent: dict[str, str] | None = None) -> dict[str, Any]:
    """A run in which these took so long, as long in every round; ours took 1 ms."""
    lines = []
    for load in LOADS:
        ours = line(MODEL, load, [1e-3, 1e-3])
        lines += [ours, line(NOTHING, load, [5e-4, 5e-4], ours)]
        lines += [line(name, load, [value, 2 * value], ours) for name, value in seconds.items()]
    alone = [
        Result(f"scores_alone_{who}_p50_b{samples}_s", 2e-3) for who in ("ours", "peers") for samples in (1, 128)
    ]
    alone += [ratio(f"peers_over_ours_scores_inprocess_b{samples}", 1.0) for samples in (1, 128)]
    return run_with([*figures("scores", lines, absent or {}), *peers_scores.ratios(lines), *alone])


def test_the_page_has_every_server_that_was_measured_and_why_others_were_not() -> None:
    measured = {name: 4e-3 for name in SERVERS if name != "torchserve_int8"}
    said = section(beside_others(measured, {"torchserve_int8": "no | java\nhere"}))
    assert "| torchserve int8 | absent: no / java here |" in said
    for name in measured:
        assert f"| {name.replace('_', ' ')} | 6.00 ms | 6,000 | 6.00 ms | 6,000 |" in said
    assert "| **ours** | 1.00 ms | 32,000 | 1.00 ms | 32,000 |" in said


def test_the_page_has_the_spread_of_ratios() -> None:
    said = section(beside_others({"mosec_int8": 4e-3}))
    assert "| `best_peer_over_ours_scores_p50_b128` | p50 of one client, B = 128 | 6.00 (4.00 to 8.00) |" in said
    assert "| `best_peer_over_ours_scores_c32_b1` | the time that an answer takes, 32 clients, B = 1 |" in said
    assert "Ours is first in every column" in said


def test_the_page_says_who_is_ahead_with_scores() -> None:
    said = section(beside_others({"mosec_int8": 5e-4, "litserve_int8": 4e-3}))
    assert "* B = 1, p50, 1 client: mosec int8 by 1.33\n" in said
    assert "* B = 128, answers/s, 32 clients: mosec int8 by 1.50\n" in said
    assert "litserve int8 by" not in said


@pytest.mark.parametrize(
    "heading",
    [
        "## Scores of whole models",
        "### Scores beside other servers",
        "### Scores of sequences",
        "## Rankings",
        "## Sequences",
    ],
)
def test_a_run_without_them_says_so(heading: str) -> None:
    assert "Not in this run." in section(run_with([]), heading)


def test_the_page_has_what_scores_take() -> None:
    names = ("served", "lookup", "lookup_and_dense", "inprocess", "inprocess_bf16", "inprocess_int8")
    results = [Result(f"scores_{name}_p50_b{samples}_s", samples * 1e-3) for name in names for samples in (1, 128)]
    results += [
        ratio(f"scores_over_{name}_p50_b{samples}", samples / 100)
        for name in ("lookup", "inprocess")
        for samples in (1, 128)
    ]
    said = section(run_with(results), "## Scores of whole models")
    assert said.count(" | 1.00 ms | 128.0 ms |\n") == len(names)
    assert "| ≤ 0.7 at B = 128 | 0.01, 1.28 |" in said


def test_the_page_has_what_sequences_take() -> None:
    kinds = ("served", "donothing", "inprocess")
    results = [Result(f"sequences_{kind}_p50_b{samples}_s", samples * 1e-3) for kind in kinds for samples in ROUNDS]
    for name in ("sequences_over_donothing_p50", "sequences_minus_donothing_over_inprocess_p50"):
        results += [ratio(f"{name}_b{samples}", samples / 10) for samples in ROUNDS]
    results += [Result(f"sequences_{kind}_c32_b1", 1234, unit="/s") for kind in kinds[:2]]
    results += [ratio("sequences_over_donothing_rps_c32_b1", 0.77)]
    said = section(run_with(results), "## Sequences")
    assert said.count(" | 1.00 ms | 16.0 ms | 128.0 ms |\n") == len(kinds)
    assert said.count(" | 0.10 | 1.60 | 12.80 |\n") == 2
    assert "1,234 of the model that does nothing; `sequences_over_donothing_rps_c32_b1` is 0.77." in said


def test_the_page_has_what_scores_of_sequences_take() -> None:
    wheres = ("p50_b1", "cold_p50_b1", "p50_b128")
    results = [
        Result(f"scores_sequences_{name}_{where}_s", 1e-3 * number)
        for name in ("inprocess", "eager", "served")
        for number, where in enumerate(wheres, start=1)
    ]
    results += [
        ratio(f"scores_sequences_{name}_{where}", number / 10)
        for name in ("over_eager", "served_over_eager")
        for number, where in enumerate(wheres, start=1)
    ]
    for name in ("inprocess", "served"):
        results += [Result(f"scores_sequences_{name}_{way}_p50_n500_s", 5e-3) for way in ("once", "repeated")]
        results.append(ratio(f"repeated_over_once_scores_sequences_{name}_p50_n500", 1.25))
    results += [
        Result("scores_sequences_eager_p50_n500_s", 6e-3),
        ratio("scores_sequences_once_over_eager_p50_n500", 0.9),
    ]
    lines = []
    for load in LOADS:
        ours = line(MODEL, load, [1e-3, 1e-3])
        lines += [ours, line(NOTHING, load, [5e-4, 5e-4], ours), line("grpc_aio_int8", load, [2e-3, 3e-3], ours)]
    results += [*figures("scores_sequences", lines, {}), *peers_scores.ratios(lines, "scores_sequences")]
    said = section(run_with(results), "### Scores of sequences")
    assert said.count(" | 1.00 ms | 2.00 ms | 3.00 ms |\n") == 3
    assert said.count(" | 0.10 | 0.20 | 0.30 |\n") == 2
    assert said.count(" | 5.00 ms | 5.00 ms | 1.25 |\n") == 2
    assert "| grpc aio int8 | 2.50 ms | 13,333 | 2.50 ms | 13,333 |" in said
    assert "| `best_peer_over_ours_scores_sequences_p50_b128` | 2.50 (2.00 to 3.00) |" in said


def rankings_of(kinds: list[str], *, with_peer: bool) -> list[Result]:
    """The results of a run in which these kinds of models were measured."""
    results = []
    for what in (*(f"scores_{kind}_inprocess" for kind in kinds), "lookup_inprocess", "lookup"):
        results += [Result(f"user_side_{what}_{way}_p50_n500_s", 4e-3) for way in ("once", "repeated")]
        results.append(ratio(f"repeated_over_once_{what}_p50_n500", 2.75))
    results.append(ratio("repeated_over_once_ids_n500", 33.1))
    for kind in kinds:
        for who in ("ours", "grpc_aio") if with_peer else ("ours",):
            for way in ("once", "repeated"):
                name = f"rank_{kind}_{who}_{way}"
                results += [Result(f"{name}_p50_s", 5e-3), Result(f"{name}_c8_rps", 150, unit="/s")]
                results += [Result(f"{name}_cpu_s", 4.5), Result(f"{name}_sent", 96_000, unit="B")]
        if with_peer:
            results += [ratio(f"best_peer_over_ours_rank_{kind}_{load}", 2.25) for load in ("p50", "c8")]
        else:
            results.append(Result(f"rank_{kind}_grpc_aio_absent", 1, unit="", note="not\ninstalled"))
    return results


@pytest.mark.parametrize("with_peer", [True, False])
def test_the_page_has_what_rankings_take(with_peer: bool) -> None:
    kinds = ["din", "towers", "dcn"]
    said = section(run_with(rankings_of(kinds, with_peer=with_peer)), "## Rankings")
    assert said.count(" | 4.00 ms | 4.00 ms | ") == 5
    assert "| `scores_din`: 2.75 | ≥ 2.5 |" in said
    assert said.count(" | 5.00 ms | 150 | 96.0 kB | 4.50 s |\n") == (12 if with_peer else 6)
    assert said.count("is 2.25 in p50") == (3 if with_peer else 0)
    assert said.count("the other server is absent: not installed") == (0 if with_peer else 3)
