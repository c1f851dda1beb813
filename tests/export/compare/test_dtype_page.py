"""The part of the page that is about AUC, in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from serving.bundle.formats import WeightDtype
from tests.support.browser import opened
from tests.support.commands import tbe_export
from tests.support.planted_tables import write_labelled

pytestmark = pytest.mark.long  # as of `test_make_study.py`, which shows the rest of the page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    day = write_labelled(folder / "day <b>&.parquet", 3000)
    done = tbe_export(
        "compare", "--model", "tests.support.planted_tables:build", "--labelled", str(day), "--label", "click",
        "--max-auc-loss", "0.003", "--out", str(folder / "report"), "--strategy", "row_wise", "--seconds", "0.01",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder / "report"


@pytest.fixture(scope="module")
def study(report: Path) -> Any:
    return json.loads((report / "study.json").read_text())


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Page]:
    with opened(report / "report.html") as page:
        yield page


def test_the_page_shows_the_numbers_of_each_dtype(page: Page, study: Any) -> None:
    assert json.loads(str(page.text_content("#study"))) == study
    cells = page.eval_on_selector_all(
        "[data-key^=dtype_study]", "cells => cells.map(cell => [cell.dataset.key, cell.innerText])"
    )
    # The trained model and the recommended bundle on each half; those of all dtypes; two tables in all dtypes but FP32.
    dtypes = len(WeightDtype)
    assert len(cells) == 2 * (2 + 6) + dtypes * 6 + 2 * (dtypes - 1) * 5
    for key, shown in cells:
        value: Any = study
        for part in key.split("/"):
            value = value[part]
        if key.endswith("bytes"):
            assert float(re.sub(r"[^0-9.]", "", shown)) * 1e3 == pytest.approx(value, rel=0.02), key
        else:
            assert shown == f"{round(value, 5) + 0.0:.5f}", key
    assert page.locator("#auc tbody tr").count() == 2 * 2 + dtypes
    assert page.locator("#auc tbody tr", has_text="held-out rows").count() == 2
    assert page.locator("code", has_text="day <b>&.parquet").count() >= 1  # a name is text, not markup
    assert "recommended.toml" in page.inner_text("body")


def test_the_recommended_dtype_of_each_table_is_marked(page: Page, study: Any) -> None:
    marked = page.eval_on_selector_all("#auc_of_tables td.best", "cells => cells.map(cell => cell.innerText)")
    assert marked == [dtype for dtype in study["dtype_study"]["recommended"]["dtypes"].values() if dtype != "fp32"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_fit_a_phone_and_have_text_for_screen_readers(page: Page, report: Path, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    pictures = page.eval_on_selector_all("img", "all => all.map(it => [it.id, it.naturalWidth, it.alt])")
    assert [name for name, _, _ in pictures if name.startswith("auc")] == ["auc_bundles", "auc_tables"]
    for name, width, alt in pictures:
        assert width > 200
        assert len(alt) > 40
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page.set_viewport_size({"width": 1100, "height": 900})
