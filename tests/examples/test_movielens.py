"""The example: its features are what it says, nothing leaks, and the demo runs to its last page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.movielens import data
from examples.movielens.model import FEATURES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def samples() -> data.Samples:
    return data.read_samples()


def test_every_rating_is_a_sample_with_every_feature(samples: data.Samples) -> None:
    assert len(samples.labels) == 100_000
    assert samples.labels.mean() == pytest.approx(0.554, abs=5e-4)  # the published share of ratings >= 4
    assert sorted(samples.features) == sorted(FEATURES)
    for name, jagged in samples.features.items():
        rows = data.catalogue().rows["item_id" if name == "recent_items" else name]
        assert jagged.offsets[-1] == jagged.values.size
        assert 0 <= jagged.values.min() <= jagged.values.max() == rows - 1
        if name not in ("genres", "title_words", "recent_items"):
            assert jagged.values.size == 100_000


def test_recent_items_are_the_latest_items_rated_positive_before(samples: data.Samples) -> None:
    """Recomputed from the raw file, sample by sample, with no state carried along."""
    ratings = sorted(
        data._read("inter"), key=lambda event: (float(event["timestamp"]), event["user_id"], event["item_id"])
    )
    items = data.catalogue().items
    recent = samples.features["recent_items"]
    of_user: dict[str, list[int]] = {}
    for number, rating in enumerate(ratings):
        of_user.setdefault(rating["user_id"], []).append(number)
    for sample in np.random.default_rng(0).integers(0, 100_000, 300):
        now = ratings[sample]
        earlier = [
            items[event["item_id"]]["item_id"][0]
            for event in (ratings[number] for number in of_user[now["user_id"]] if number < sample)
            if float(event["timestamp"]) < float(now["timestamp"]) and float(event["rating"]) >= 4
        ]
        history = recent.values[recent.offsets[sample] : recent.offsets[sample + 1]].tolist()
        assert history == earlier[-data.RECENT_ITEMS :]


def test_test_samples_are_later_than_training_samples(samples: data.Samples) -> None:
    times = sorted(float(event["timestamp"]) for event in data._read("inter"))
    assert samples.train[-1] + 1 == samples.test[0]
    assert times[samples.train[-1]] <= times[samples.test[0]]
    assert len(samples.train) + len(samples.test) == 100_000


def test_taking_samples_of_a_jagged_feature_keeps_their_bags() -> None:
    jagged = data.Jagged.of([[1, 2], [], [3], [4, 5, 6]])
    values, lengths = jagged.take(np.array([3, 1, 0, 3]))
    assert values.tolist() == [4, 5, 6, 1, 2, 4, 5, 6]
    assert lengths.tolist() == [3, 0, 2, 3]


def run_in(folder: Path, *arguments: str) -> str:
    """What Python prints in a folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_demo(page: str, folder: Path) -> None:
    """The last page of the demo, and what it left in the folder."""
    page = page[page.index("MovieLens-100k, from training to gRPC") :]
    table = re.findall(r"(float|int8, gRPC|int4, gRPC|int8, scores) +(0\.\d{5}) ", page)
    auc = {what: float(number) for what, number in table}
    assert auc["float"] > 0.69
    assert auc["int8, gRPC"] == pytest.approx(auc["float"], abs=5e-4)
    assert auc["int4, gRPC"] == pytest.approx(auc["float"], abs=5e-3)
    assert auc["int8, scores"] == pytest.approx(auc["int8, gRPC"], abs=1e-5)
    assert (folder / "build/demo/repository/movielens/1/manifest.json").exists()


def test_the_demo_ends_with_the_same_auc_from_int8_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a third of the training."""
    from examples.movielens import demo, train

    monkeypatch.setattr(train, "EPOCHS", 1)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    demo.main()
    check_demo(capsys.readouterr().out, tmp_path)


@pytest.mark.long
def test_the_unchanged_demo_runs_to_its_last_page(tmp_path: Path) -> None:
    check_demo(run_in(tmp_path, "-m", "examples.movielens.demo"), tmp_path)


@pytest.mark.long
def test_fresh_rows_rank_better_than_stale_ones(tmp_path: Path) -> None:
    """`make demo-fresh`: scores by a server that deltas reach while the model is trained."""
    said = run_in(tmp_path, "-m", "examples.movielens.fresh")
    stale, fresh, trained = (float(match) for match in re.findall(r"(?:exported|fresh|here) +(0\.\d{4})", said))
    assert fresh - stale >= 0.02
    assert trained == pytest.approx(fresh, abs=5e-3)
    assert (tmp_path / "build/demo-fresh/auc.png").exists()
