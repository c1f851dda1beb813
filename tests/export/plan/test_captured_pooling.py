"""Average ids in a bag, measured in captured requests."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from export import ExportConfig, Sharding
from export.pipeline import plan_model
from export.plan.report import report_plan
from export.plan.sharding import captured_pooling
from serving.bundle.tables import Feature
from serving.errors import ConfigurationError
from serving.requests.captured import CapturedRequest
from tests.support.models import SUM, collection

FEATURES = (
    Feature(name="item_id", table="item"),
    Feature(name="recent", table="item"),
    Feature(name="user", table="user"),
    Feature(name="user_bias", table="bias", shared_key="user"),
)


def captured(folder: Path, *requests: tuple[list[str] | None, list[int]]) -> Path:
    lines = [
        CapturedRequest(
            at="", why="slow: 1 ms", features=features, values=[0] * max(0, sum(lengths)), lengths=lengths
        )
        for features, lengths in requests
    ]
    path = folder / "m.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_bags_are_averaged_over_the_samples_that_have_them(tmp_path: Path) -> None:
    path = captured(tmp_path, (None, [1, 1, 10, 20, 2, 0]), (["recent"], [30, 0, 0]), (["user", "item_id"], [4, 1]))
    assert captured_pooling(path, FEATURES) == {"item_id": 1.0, "recent": 12.0, "user": 2.0, "user_bias": 2.0}


def test_ids_of_a_shared_key_are_divided_by_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    line = CapturedRequest(
        at="",
        why="",
        features=["user", "item_id"],
        values=[0] * 14,
        lengths=[10, 1, 1, 1, 1],
        shared=["user", "price"],
    )
    wrong = CapturedRequest(at="", why="", features=["user", "item_id"], values=[], lengths=[], shared=["user"])
    path.write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in (line, wrong)))
    assert captured_pooling(path, FEATURES) == {"item_id": 1.0, "recent": 1.0, "user": 2.5, "user_bias": 2.5}


def test_features_without_requests_have_a_pooling_factor_of_1(tmp_path: Path) -> None:
    assert captured_pooling(captured(tmp_path, (["recent"], [7])), FEATURES) == {
        "item_id": 1.0,
        "recent": 7.0,
        "user": 1.0,
        "user_bias": 1.0,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((["other"], [5]), id="unknown-key"),
        pytest.param((None, [5, 5]), id="no-multiple-of-the-keys"),
        pytest.param((["recent"], [5, -1]), id="negative"),
        pytest.param(([], []), id="no-keys"),
    ],
)
def test_requests_that_the_model_cannot_answer_are_left_out(tmp_path: Path, wrong: Any) -> None:
    good = (["recent"], [2, 4])
    assert captured_pooling(captured(tmp_path, wrong, good), FEATURES)["recent"] == 3.0
    with pytest.raises(
        ConfigurationError,
        match=r"traffic: .*m\.jsonl: expected requests for the keys item_id, recent, user, found none",
    ):
        captured_pooling(captured(tmp_path, wrong), FEATURES)


def test_lengths_that_contradict_the_ids_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    wrong = CapturedRequest(at="", why="refused: lengths", features=["recent"], values=[1], lengths=[5])
    path.write_bytes(msgspec.json.encode(wrong) + b"\n")
    with pytest.raises(ConfigurationError, match="found none among 1 requests"):
        captured_pooling(path, FEATURES)


def test_plan_notes_lines_that_are_no_requests(tmp_path: Path) -> None:
    path = captured(tmp_path, (["x"], [2, 4]))
    with path.open("a") as file:
        file.write('{"at": "", "why": "", "values": [1], "lengths": [1], "traceparent": 7}\n{"at')
    assert captured_pooling(path, (Feature(name="x", table="t"),)) == {"x": 3.0}
    sharding = Sharding(traffic=path)
    report = report_plan(plan_model(collection(SUM), ExportConfig(sharding=sharding)), sharding)
    (note,) = (value for value in report.notes if "lines skipped" in value)
    assert note.startswith(f"{path}: lines skipped, which are not captured requests: 2; line 2: expected")


def test_a_file_that_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        captured_pooling(tmp_path / "none.jsonl", FEATURES)
    (tmp_path / "m.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match="line 1: expected a captured request"):
        captured_pooling(tmp_path / "m.jsonl", FEATURES)


def test_given_factors_override_measured_ones(tmp_path: Path) -> None:
    path = captured(tmp_path, (None, [1, 10, 4]))
    sharding = Sharding(traffic=path, pooling_factors={"user": 50.0}).measured(FEATURES)
    assert sharding.traffic is None
    assert sharding.pooling_factors_of("item", 2) == [1.0, 10.0]
    assert sharding.pooling_factors_of("user", 1) == [50.0]
    assert sharding.pooling_factors_of("bias", 1) == [4.0]
    unmeasured = Sharding()
    assert unmeasured.measured(FEATURES) is unmeasured


def test_a_table_whose_name_is_a_glob_is_measured(tmp_path: Path) -> None:
    features = (Feature(name="a", table="t[0]"),)
    sharding = Sharding(traffic=captured(tmp_path, (None, [6])))
    assert sharding.measured(features).pooling_factors_of("t[0]", 1) == [6.0]
