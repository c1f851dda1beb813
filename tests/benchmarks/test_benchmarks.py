"""What the benchmarks compare is the same for all, and the page says what the last run found."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers_hosts
from benchmarks.peer_servers import HERE, PEERS
from benchmarks.peer_workload import PeerWorkload, movielens
from benchmarks.quietness import Quietness
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from tests.support.long_cases import one_in

ROOT = Path(__file__).parents[2]
LATEST = ROOT / "benchmarks" / "results" / "latest.json"


def test_peers_and_the_engine_answer_the_same_requests_alike(tmp_path: Path, ragged: PeerWorkload) -> None:
    bundle = ragged.export(tmp_path / "repository")
    ragged.write(tmp_path / "rows", ["fp32", "int8"])
    sys.path.insert(0, str(HERE))
    from tables import Tables  # type: ignore[import-not-found]

    saved = np.load(tmp_path / "rows" / "requests_5.npz")
    engine = Engine.open(bundle)
    for number, (padded, tensors) in enumerate(zip(ragged.requests[5], ragged.tensors(5), strict=True)):
        answer = ragged.answer(padded)
        assert answer.shape == (5, ragged.width)
        assert np.abs(engine.outputs(tensors)[EMBEDDINGS] - answer).max() < 0.01
        for kind, error in (("fp32", 1e-5), ("int8", 0.01)):
            assert np.abs(Tables(tmp_path / "rows", kind)(saved["ids"][number]) - answer).max() < error
    assert tensors.values.size == (ragged.requests[5][-1] >= 0).sum()
    np.testing.assert_array_equal(saved["answer"], ragged.answer(ragged.requests[5][0]))


def test_requests_follow_the_order_of_the_ratings() -> None:
    workload = movielens()
    assert workload.requests[1].shape[:2] == (256, 1)
    assert workload.requests[128].shape[:2] == (32, 128)
    np.testing.assert_array_equal(workload.requests[1][:128, 0], workload.requests[128][0])
    assert (workload.requests[128] >= -1).all()


def test_the_page_is_rendered_from_the_last_run() -> None:
    from benchmarks import document

    run = json.loads(LATEST.read_text())
    assert document.render(run, LATEST.resolve().name) == (ROOT / "docs" / "benchmarks.md").read_text()
    assert run["command"] == "make bench"


def test_the_last_run_has_every_server_or_says_why_not() -> None:
    run = json.loads(LATEST.read_text())
    for workload in ("dlrm_1m", "wide", "movielens"):
        for peer in PEERS:
            measured = f"{workload}_{peer}_c1_b1_p50_s" in run["results"]
            assert measured or run["absent"][f"{workload}_{peer}_absent"]
        for samples in (1, 128):
            assert run["ratios"][f"best_peer_over_ours_p50_{workload}_b{samples}"] > 0
            assert run["ratios"][f"ours_over_best_peer_rps_{workload}_b{samples}"] > 0
    for peer in peers_hosts.PEERS:
        assert f"{peer}_p50_b1_s" in run["results"] or run["absent"][f"{peer}_absent"]


@pytest.mark.parametrize(
    ("quiet", "said"), one_in(2, [(True, "It was a quiet run."), (False, "It was not a quiet run")])
)
def test_the_page_says_whether_the_run_was_quiet(quiet: bool, said: str) -> None:
    from benchmarks import document

    run = json.loads(LATEST.read_text())
    page = document.render(run | {"others": Quietness().activity() | {"quiet": quiet, "before": 1.234}}, "x.json")
    assert "Other processes kept 1.23 cores busy before the run" in page
    assert said in page


def test_results_are_named_by_date_and_machine() -> None:
    name = os.readlink(LATEST)
    assert name.startswith(json.loads(LATEST.read_text())["date"][:10])
    assert name.endswith("-cores.json")


def test_curves_are_labelled_once_and_in_plain_numbers() -> None:
    from benchmarks import document

    figure = document.draw(json.loads(LATEST.read_text())["results"])
    figure.canvas.draw()
    panels = figure.axes
    assert [axes.get_xlabel() for axes in panels] == list(document.CURVES.values())
    assert [axes.get_ylabel() for axes in panels] == ["p50 in µs", "", "", ""]
    for axes in panels:
        sides = [labels for which in ("major", "minor") for labels in panels[0].get_yticklabels(which=which)]
        ticks = [label.get_text() for label in (*axes.get_xticklabels(), *sides)]
        assert any(ticks)
        assert not any("mathdefault" in tick for tick in ticks), ticks  # as powers of ten are


def test_a_part_measured_again_replaces_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__ as benchmarks
    from benchmarks import document

    whole = json.loads(LATEST.read_text())
    (tmp_path / "a-run.json").write_text(json.dumps(whole))
    (tmp_path / "latest.json").symlink_to("a-run.json")
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    name = next(iter(whole["ratios"]))
    report = whole | {"date": "2031-02-03T04:05:06+00:00", "results": {}, "ratios": {name: 123.0}}
    assert benchmarks._replace("whole models", report) == tmp_path / "a-run.json"
    merged = json.loads((tmp_path / "latest.json").read_text())
    assert merged["ratios"] == whole["ratios"] | {name: 123.0}
    assert merged["results"] == whole["results"]
    assert merged["date"] == whole["date"]
    assert '* "whole models" on 2031-02-03' in document.render(merged, "a-run.json")
    elsewhere = report | {"machine": report["machine"] | {"cores": 4096}}
    with pytest.raises(SystemExit, match="expected a run on this machine, cores 4096"):
        benchmarks._replace("whole models", elsewhere)
    assert json.loads((tmp_path / "latest.json").read_text()) == merged
