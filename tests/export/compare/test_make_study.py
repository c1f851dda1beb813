"""`tbe-export compare`: what it measures is right, and its page shows it, in a real browser."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from playwright.sync_api import Page
from typer.testing import CliRunner

from export.__main__ import app
from export.compare.study import Placement, Study, judge
from serving.bench.report import Figure
from serving.bundle.formats import WeightDtype
from tests.support.browser import opened

# To measure all of it takes long. `tests/export/commands/test_compare.py` shows the command.
pytestmark = pytest.mark.long

TABLES = """
[tables."item <b>&"]
rows = 20_000
dim = 64
pooling_factor = 20
features = ["item", "recent"]
[tables.query]
rows = 5_000
dim = 32
pooling = "mean"
pooling_factor = 2.5
[tables.country]
rows = 200
dim = 16
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of every strategy on 2 and 4 ranks, in two dtypes."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "tables.toml").write_text(TABLES)
    arguments = ["compare", "--tables", str(folder / "tables.toml"), "--out", str(folder / "report")]
    done = CliRunner().invoke(app, [*arguments, "--seconds", "0.01", "--batch-size", "16", "--ranks-per-host", "2"])
    assert done.exit_code == 0, done.output
    assert "Whole on one rank, int8 answers 16 samples" in done.output
    assert "report.html, and study.json" in done.output
    return folder / "report"


@pytest.fixture(scope="module")
def study(report: Path) -> Any:
    return json.loads((report / "study.json").read_text())


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Page]:
    with opened(report / "report.html") as page:
        yield page


def test_every_strategy_is_placed_and_measured(study: Any) -> None:
    placements = study["placements"]
    assert len(placements) == 2 * 2 * 10
    assert all(placement["error"] is None for placement in placements)
    for placement in placements:
        for name in ("latency_s", "one_rank_s", "over_one_rank", "side_by_side_over_one_rank"):
            assert 0 < placement[name]["low"] <= placement[name]["median"] <= placement[name]["high"]
        assert placement["latency_s"]["median"] <= placement["latency_p99_s"]
        assert placement["samples_per_s"] == pytest.approx(16 / placement["latency_s"]["median"])
        assert placement["split_s"] > 0
        assert placement["slowest_rank_s"] > 0
        assert placement["merge_s"] > 0
        assert len(placement["rank_bytes"]) == len(placement["traffic"]) == placement["ranks"]
        if placement["strategy"] not in ("mixed", "auto", "auto-simple"):
            assert set(placement["sharding"].values()) == {placement["strategy"]}
        if placement["strategy"] == "data_parallel":
            assert np.sum(placement["traffic"]) == 0


def test_ranks_hold_the_bytes_of_their_shards(study: Any) -> None:
    floats = {"item <b>&": (20_000, 64), "query": (5_000, 32), "country": (200, 16)}
    row_bytes = {"int8": lambda dim: dim + 4, "int4": lambda dim: dim // 2 + 4}
    for placement in study["placements"]:
        for name, (rows, dim) in floats.items():
            bytes_held = sum(rank.get(name, 0) for rank in placement["rank_bytes"])
            whole = rows * row_bytes[placement["dtype"]](dim)
            kind = placement["sharding"][name]
            if kind in ("table_wise", "row_wise", "table_row_wise"):
                assert bytes_held == whole
            elif kind == "data_parallel":
                assert bytes_held == whole * placement["ranks"]
            else:
                assert whole <= bytes_held <= 2 * whole  # a scale and a bias for each block of columns


def test_the_mixed_placement_uses_the_recommended_types(study: Any) -> None:
    advice = {name: recommendation["sharding_type"] for name, recommendation in study["recommendations"].items()}
    (mixed,) = (
        placement
        for placement in study["placements"]
        if (placement["strategy"], placement["ranks"], placement["dtype"]) == ("mixed", 4, "int8")
    )
    assert mixed["sharding"] == advice


def test_errors_are_those_of_the_dtypes(study: Any) -> None:
    for table in study["tables"].values():
        dtypes = {dtype["dtype"]: dtype for dtype in table["dtypes"]}
        by_bits = sorted(WeightDtype, key=lambda dtype: dtype.format.bits)
        assert list(dtypes) == [dtype.value.lower() for dtype in by_bits]
        errors = [dtype["largest_error"] for dtype in dtypes.values()]
        assert errors == sorted(errors, reverse=True)
        assert (dtypes["fp32"]["largest_error"], dtypes["fp32"]["cosine"]) == (0, 1)
        assert dtypes["int8"]["largest_error"] < 0.5 / 255  # rows of normal numbers of 0.05: a range below 0.5


def test_the_page_shows_its_numbers_without_console_errors(page: Page, study: Any) -> None:
    assert json.loads(str(page.text_content("#study"))) == study
    cells = page.eval_on_selector_all("[data-key]", "cells => cells.map(cell => [cell.dataset.key, cell.innerText])")
    assert len(cells) > 8 * len(study["placements"])
    for key, shown in cells:
        value: Any = study
        for part in key.split("/"):
            value = value[int(part)] if isinstance(value, list) else value[part]
        number = float(re.sub(r"[^0-9.e+-]", "", shown.replace("kB", "e3").replace("MB", "e6").replace("B", "")))
        scale = 1e3 if re.search(r"_s\b", key) else 1
        rough = 0.06 if "bytes" in key or "error" in key else 0.01
        rounded = 0.005 if "over_one_rank" in key else 0
        assert number == pytest.approx(scale * value, rel=rough, abs=rounded), key
    rows = page.locator("#placements tbody tr")
    assert rows.count() == len(study["placements"]) + len(study["one_rank"])
    assert page.locator("td", has_text="item <b>&").count() >= 1  # a name is text, not markup


def test_figures_have_text_for_screen_readers(page: Page, report: Path) -> None:
    pictures = page.eval_on_selector_all("img", "all => all.map(it => [it.id, it.naturalWidth, it.alt])")
    assert [name for name, _, _ in pictures] == ["latency", "memory", "traffic", "errors"]
    for name, width, alt in pictures:
        assert width > 300
        assert len(alt) > 40
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_fits_phones_and_paper(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.wait_for_function("document.querySelectorAll('.cut').length == 3")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    assert page.evaluate(CUES) == [[True, True]] * 3
    page.set_viewport_size({"width": 1100, "height": 900})
    assert page.pdf(format="A4").count(b"/Type /Page") > 3


CUES = """() => [...document.querySelectorAll(".wide")].map(table => [
    table.scrollWidth > table.clientWidth,
    table.previousElementSibling.matches(".cue") && table.previousElementSibling.offsetHeight > 0,
])"""

DRAWN = "all => all.map(it => [it.id, it.clientWidth, it.currentSrc])"


@pytest.mark.parametrize("width", [360, 1100])
def test_text_of_figures_can_be_read_on_any_screen(page: Page, width: int) -> None:
    """In pixels as they are shown: 8 is small print."""
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function(f"document.documentElement.clientWidth == {width}")
    for name, shown, source in page.eval_on_selector_all("img", DRAWN):
        svg = base64.b64decode(source.partition(",")[2]).decode()
        drawn = float(re.findall(r'viewBox="0 0 ([0-9.]+)', svg)[0])
        sizes = [float(match) for match in re.findall(r"font-size: ([0-9.]+)px", svg)]
        assert sizes, name
        assert min(sizes) * shown / drawn >= 8, name


def test_a_number_of_bytes_stays_in_one_line(page: Page) -> None:
    text = page.inner_text("body")
    assert re.findall(r"\d[ \n][kMGT]?B\b", text) == []
    assert "0\N{NO-BREAK SPACE}B" in text


def test_a_table_shown_in_full_has_no_scroll_cue(page: Page) -> None:
    page.set_viewport_size({"width": 1100, "height": 900})
    page.wait_for_function("document.querySelectorAll('.cut').length == 0")
    assert page.evaluate(CUES) == [[False, False]] * 3


def placed(strategy: str, low: float, median: float, high: float, error: str | None = None) -> Placement:
    figure = Figure(median, low, high)
    return Placement(
        strategy=strategy, ranks=4, hosts=1, dtype="int8", error=error,
        latency_s=figure, one_rank_s=Figure(1, 1, 1), over_one_rank=figure, side_by_side_over_one_rank=figure,
        rank_bytes=[{"t": 1}], traffic=[[0]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("placements", "fastest", "said"),
    [
        pytest.param(
            [placed("mixed", 1.4, 1.5, 1.6), placed("row_wise", 1.0, 1.1, 1.2), placed("auto", 1.19, 1.3, 1.5)],
            ["row_wise", "auto"],
            "mixed, the types below, is not recommended for speed: it took 1.50 (1.40–1.60) times one rank's time, "
            "row_wise 1.10 (1.00–1.20) times.",
            id="slower",
        ),
        pytest.param(
            [placed("mixed", 1.15, 1.5, 1.6), placed("row_wise", 1.0, 1.1, 1.2)],
            ["row_wise", "mixed"],
            "mixed, the types below, is among the fastest, whose times do not differ significantly.",
            id="not told apart",
        ),
        pytest.param(
            [placed("mixed", 1.0, 1.1, 1.2), placed("row_wise", 1.3, 1.4, 1.5)],
            ["mixed"],
            "mixed, the types below, is the fastest: take it.",
            id="fastest",
        ),
        pytest.param(
            [placed("row_wise", 0, 0, 0, error="does not fit"), placed("mixed", 1.0, 1.1, 1.2)],
            ["mixed"],
            "mixed, the types below, is the fastest: take it.",
            id="of those that fit",
        ),
    ],
)
def test_recommendations_follow_the_measured_placements(
    study: Any, placements: list[Placement], fastest: list[str], said: str
) -> None:
    from export.compare.page import findings

    verdicts = judge(placements)
    assert [verdict.fastest for verdict in verdicts] == [fastest] * 2
    changed = msgspec.structs.replace(msgspec.convert(study, Study), placements=placements, verdicts=verdicts)
    assert f"On 4 ranks {said}" in list(findings(changed))


def test_the_study_s_verdicts_are_of_its_placements(study: Any) -> None:
    assert study["verdicts"] == msgspec.to_builtins(judge(msgspec.convert(study, Study).placements))
    assert len(study["verdicts"]) == 2 * 2 * 2
    assert study["confidence"] == pytest.approx(0.961, abs=0.001)
