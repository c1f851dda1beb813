"""Which inputs are the user's, what the export says of them, and when it writes no programs for them."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from export import ExportConfig, export_model
from export.commands import show
from export.user_side.builder import Builder
from export.user_side.compile import names_of_user_side
from export.user_side.values import Part
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Manifest
from serving.bundle.scores import ITEMS_PROGRAM, USER_PROGRAM, DenseDtype, DenseInput, InputDtype
from serving.errors import ConfigurationError
from tests.support.long_cases import one_in
from tests.support.ranker import mixing, ranker
from tests.support.scored_models import EXACT

USER_SIDE = ("x", "user")


def manifest_of(folder: Path, config: ExportConfig) -> Manifest:
    return open_bundle(export_model(ranker(), folder, "m", config)).manifest


def test_the_export_says_what_is_computed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of(tmp_path, replace(EXACT, user_side=["x", "user*"]))
    part = manifest.dense_part
    assert part is not None
    assert part.user_side is not None
    assert part.user_side.names == USER_SIDE
    assert "user_side" in manifest.requires
    show.show_scores(manifest, part)
    said = capsys.readouterr().out
    side = part.user_side
    assert f"user side: x, user: {side.per_user} of {side.operators} operators of the dense part" in said
    assert 0 < side.per_user < side.operators


@pytest.mark.parametrize("pattern", one_in(3, ["xx?", "nobody", ""]))
def test_patterns_that_match_nothing_are_refused(tmp_path: Path, pattern: str) -> None:
    expected = (
        f"user_side '{pattern}': expected the name of a feature or dense input, or a glob over names, matches none"
    )
    with pytest.raises(ConfigurationError, match=expected.replace("?", r"\?")):
        export_model(ranker(), tmp_path, "m", replace(EXACT, user_side=["user", pattern]))


def test_patterns_that_leave_nothing_to_the_items_are_refused(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, EXACT)
    assert manifest.dense_part is not None
    with pytest.raises(
        ConfigurationError, match=r"user_side: expected .* of the items .*, got 'x', '\*' for x, y, z,"
    ):
        names_of_user_side(["x", "*"], manifest, manifest.dense_part)


def test_an_input_with_a_row_for_each_id_follows_its_key(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, EXACT)
    assert manifest.dense_part is not None
    times = DenseInput("times", (), InputDtype.INT64, key="x")
    part = msgspec.structs.replace(manifest.dense_part, inputs=(*manifest.dense_part.inputs, times))
    with pytest.raises(
        ConfigurationError,
        match=r"user_side 'tim\*': .* matches none of x, y, z, .*: 'times' has a row for each id of 'x', and follows that key",
    ):
        names_of_user_side(["x", "tim*"], manifest, part)
    assert names_of_user_side(["[xt]*"], manifest, part) == ("x",)


def test_a_user_side_needs_scores() -> None:
    with pytest.raises(ConfigurationError, match=r"user_side \(--user-side\): expected --scores beside it"):
        ExportConfig(user_side=["user"])


def test_weights_that_are_not_fp32_have_no_programs(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, replace(EXACT, user_side=USER_SIDE, dense_dtype=DenseDtype.BF16))
    expect_no_programs(manifest, "the dense part has BF16 weights")


def test_samples_that_meet_have_no_programs(tmp_path: Path) -> None:
    manifest = open_bundle(export_model(mixing(), tmp_path, "m", replace(EXACT, user_side=["x"]))).manifest
    expect_no_programs(manifest, "samples may meet in aten.mean.default")


def test_a_planted_off_by_one_column_writes_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the weight of each part of a layer is cut one column too early."""
    cut = Builder.cut

    def too_early(self: Builder, part: Part, dim: int, start: int, width: int) -> Part:
        return cut(self, part, dim, max(0, start - 1), width)

    monkeypatch.setattr(Builder, "cut", too_early)
    expect_no_programs(manifest_of(tmp_path, replace(EXACT, user_side=USER_SIDE)), "output 'both' is off by")


def expect_no_programs(manifest: Manifest, why: str) -> None:
    assert manifest.dense_part is not None
    assert manifest.dense_part.user_side is None
    assert not {USER_PROGRAM, ITEMS_PROGRAM} & manifest.files.keys()
    assert "user_side" not in manifest.requires
    (note,) = (note for note in manifest.notes if note.startswith("user_side: "))
    assert note.startswith(f"user_side: all requests are scored by the whole dense part: {why}")
