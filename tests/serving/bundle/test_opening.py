"""A bundle is read strictly: whatever is missing, unknown, damaged or too new is refused by name."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.bundle.opening import open_bundle, verify_digests, weights_changed_since
from serving.engine import Engine
from serving.errors import BundleError


@pytest.fixture
def bundle(mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixed, tmp_path / "1"))


def edit(bundle: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_a_published_bundle_opens_and_its_digests_agree(bundle: Path) -> None:
    verify_digests(open_bundle(bundle))


def test_a_bundle_of_the_format_before_is_read(bundle: Path) -> None:
    def as_before(manifest: Any) -> None:
        manifest["format_version"] = 3
        manifest.pop("left_out", None), manifest.pop("notes", None)
        for parity in manifest["parity"]:
            parity.pop("trained", None)

    edit(bundle, as_before)
    manifest = open_bundle(bundle).manifest
    assert list(manifest.keys) == [feature.name for feature in manifest.features]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda m: m.update(format_version=6), r"format_version: expected one of \(3, 4, 5\), got 6", id="newer format"),
        pytest.param(lambda m: m.update(format_version=6, more={}), r"format_version: expected one of \(3, 4, 5\), got 6", id="newer format, new key"),
        pytest.param(lambda m: m.update(more=1), "unknown field `more`", id="unknown key"),
        pytest.param(lambda m: m["tables"][0].update(more=1), r"unknown field `more` - at `\$.tables\[0\]`", id="unknown key in a table"),
        pytest.param(lambda m: m.pop("plan"), "missing required field `plan`", id="missing key"),
        pytest.param(lambda m: m["tables"][0].update(dtype="INT3"), "INT3", id="unknown dtype"),
        pytest.param(lambda m: m["tables"][0].update(rows="many"), "Expected `int`, got `str`", id="wrong type"),
        pytest.param(lambda m: m["tables"][0].update(rows=10**6), "table 'user': its shards do not cover rows exactly once: look at row 500", id="rows"),
        pytest.param(lambda m: m["features"][0].update(table="none"), "feature 'user_id': no table 'none'", id="no such table"),
        pytest.param(lambda m: m["features"].append(m["features"][0]), "features: a name appears twice", id="feature twice"),
        pytest.param(lambda m: m.update(features=[]), "features: expected at least one", id="no features"),
        pytest.param(lambda m: m["plan"]["shards"].pop(), "table 'word': its shards do not cover", id="no shard"),
        pytest.param(lambda m: m["plan"]["shards"][0].update(rank=3), "table 'user': no rank 3", id="no rank"),
        pytest.param(lambda m: m["plan"]["shards"][3].update(offset_bytes=10**6), "table 'word': bytes .* are outside", id="offset"),
        pytest.param(lambda m: m["plan"]["shards"][0].update(offset_bytes=-1), "table 'user': bytes .* are outside", id="negative offset"),
        pytest.param(lambda m: m["plan"].update(row_alignment=16), "row_alignment: expected 1 on cpu, got 16", id="row alignment"),
        pytest.param(lambda m: m["plan"]["ranks"][0].update(device="cuda"), "cuda", id="another device"),
        pytest.param(lambda m: m["plan"]["ranks"][0].update(weights="../weights.0.bin"), "files: expected", id="path out of the bundle"),
        pytest.param(lambda m: m["files"].pop("program.pt"), "files: expected", id="file without digest"),
        pytest.param(lambda m: m["files"]["program.pt"].update(sha256="0" * 64), "program.pt: expected SHA-256 0000", id="digest"),
        pytest.param(lambda m: m["files"]["weights.0.bin"].update(size_bytes=10**8), "weights.0.bin: expected 100000000 bytes", id="size"),
    ],
)  # fmt: skip
def test_an_edited_manifest_is_refused(bundle: Path, change: Callable[[Any], None], message: str) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=message) as refused:
        open_bundle(bundle)
    assert str(bundle) in str(refused.value)


@pytest.mark.parametrize("name", ["../weights.0.bin", "a\0b"], ids=["path", "zero byte"])
def test_a_path_out_of_the_bundle_is_refused_even_with_a_digest(bundle: Path, name: str) -> None:
    def leave(manifest: Any) -> None:
        manifest["plan"]["ranks"][0]["weights"] = name
        manifest["files"][name] = manifest["files"].pop("weights.0.bin")

    edit(bundle, leave)
    with pytest.raises(BundleError, match="leaves the bundle"):
        open_bundle(bundle)


def test_a_program_is_refused_with_another_manifest(bundle: Path) -> None:
    """Swapped tables of a consistent manifest would read rows at another table's offset."""

    def swap(manifest: Any) -> None:
        manifest["features"][0]["name"], manifest["features"][1]["name"] = "item_id", "user_id"

    edit(bundle, swap)
    open_bundle(bundle)
    with pytest.raises(BundleError, match=r"program\.pt: was compiled for another manifest"):
        Engine.open(bundle)


@pytest.mark.parametrize("name", ["manifest.json", "model.py", "program.pt", "weights.0.bin"])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: cannot be read: No such file"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["model.py", "program.pt", "weights.0.bin"])
def test_a_truncated_file_is_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    with pytest.raises(BundleError, match=f"{name}: expected {len(content)} bytes, got {len(content) - 1}"):
        open_bundle(bundle)


def test_a_flipped_weight_is_found_by_verifying(bundle: Path) -> None:
    path = bundle / "weights.0.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    opened = open_bundle(bundle)  # costs no read of the weights, so it cannot know
    with pytest.raises(BundleError, match=r"weights\.0\.bin: expected SHA-256"):
        verify_digests(opened)


def test_whether_weights_changed_is_the_kernel_s_to_say(bundle: Path) -> None:
    opened = open_bundle(bundle)
    weights = bundle / "weights.0.bin"
    created = weights.stat().st_ctime
    assert weights_changed_since(opened, created - 1)
    assert not weights_changed_since(opened, created + 1)
    content = weights.read_bytes()
    time.sleep(0.05)
    moment = time.time()
    time.sleep(0.05)
    weights.write_bytes(content)
    os.utime(weights, (0, 0))  # what anybody can say of a file's times
    assert weights_changed_since(opened, moment)


def test_no_manifest_at_all_and_no_json(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is .* a bundle"):
        open_bundle(tmp_path / "nowhere")
    (bundle / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match=r"manifest\.json: Input data was truncated"):
        open_bundle(bundle)
