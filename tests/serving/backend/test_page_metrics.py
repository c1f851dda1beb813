"""What operators see of the memory that weights lie in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from export import export_model
from serving.backend import page_metrics
from serving.backend.page_metrics import PageMetrics
from serving.bundle import open_bundle
from serving.server import run_server
from serving.tables import memory_budget
from serving.tables.table_files import PagesUsed, TableFiles
from tests.support.huge_pages import HUGE_PAGE, expect_huge
from tests.support.models import Spec, collection
from tests.support.servers import FREE, metric

ROWS = 80_000  # 68 bytes each: two huge pages and a half
LABELS = {"model": "m", "version": "1"}


class Gauge:
    """A gauge of Triton's, and the family that it is of."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def Metric(self, labels: object) -> "Gauge":  # noqa: N802 - Triton's name
        assert labels == LABELS
        return self

    def set(self, value: float) -> None:
        self.seen.append(value)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return export_model(collection((Spec("t", ROWS, 64, "SUM", ("x",)),)), tmp_path / "r", "m")


class Fake(TableFiles):
    """Weights that are populated when the test says so."""

    done: Callable[[PagesUsed], None]

    def populate(self, done: Callable[[PagesUsed], None] = lambda _: None) -> None:
        self.done = done


def test_mapped_pages_are_measured_repeatedly_and_logged_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_bundle(bundle)
    fake = Fake(opened.path, opened.manifest)
    gauges: dict[str, Gauge] = {}
    said: list[str] = []
    clock = [100.0]
    monkeypatch.setattr(page_metrics, "monotonic", lambda: clock[0])
    pages = PageMetrics(lambda name, *_: gauges.setdefault(name, Gauge()), LABELS, fake, said.append)  # type: ignore[arg-type]
    for _ in range(3):
        pages.publish()
    assert gauges["tbe_weights_bytes"].seen == [ROWS * 68]
    assert len(gauges["tbe_weights_huge_bytes"].seen) == 1
    fake.done(PagesUsed(mapped=120, huge=89, most_huge=100))
    for _ in range(3):
        pages.publish()
    (line,) = said
    assert line.startswith("m 1: 89 of 120 bytes of weights are in huge pages, so that lookups take up to twice")
    assert "--weights-memory huge" in line
    assert len(gauges["tbe_weights_bytes"].seen) == 2
    fake.done(PagesUsed(mapped=120, huge=90, most_huge=100))
    clock[0] += 20
    pages.publish()
    assert len(said) == 1
    assert len(gauges["tbe_weights_bytes"].seen) == 3


def test_weights_larger_than_memory_are_reported(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: 1000)
    opened = open_bundle(bundle)
    said: list[str] = []
    PageMetrics(lambda *_: Gauge(), LABELS, TableFiles(opened.path, opened.manifest), said.append)  # type: ignore[arg-type]
    (line,) = said
    assert line.startswith(
        "m 1: its weights are larger than memory, or than what other models and versions leave of it"
    )


def test_a_server_tells_how_its_weights_are_mapped(bundle: Path, tmp_path: Path) -> None:
    with run_server(bundle.parents[1], FREE, log=tmp_path / "log") as server:
        assert metric(server, "tbe_weights_bytes", version="1") == ROWS * 68
        expect_huge(int(metric(server, "tbe_weights_huge_bytes", version="1")), 2 * HUGE_PAGE, tmp_path)
