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


def test_the_page_lists_measured_servers_and_why_others_are_missing() -> None:
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


def test_the_page_names_the_servers_that_score_faster() -> None:
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
def test_a_section_without_results_says_not_in_this_run(heading: str) -> None:
    assert "Not in this run." in section(run_with([]), heading)
