"""A bundle is read strictly: whatever is missing, unknown, damaged or too new is refused by name."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.bundle.load import open_bundle, verify_digests, weights_changed_since
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


@pytest.mark.parametrize("version", range(3, 10))
def test_a_bundle_of_a_pre_release_is_refused(bundle: Path, version: int) -> None:
    def to_pre_release(manifest: Any) -> None:
        del manifest["requires"]
        manifest.update(format_version=version, another_key=1)

    edit(bundle, to_pre_release)
    with pytest.raises(BundleError, match=f"format_version: expected 10, got {version}: exported by a pre-release"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda m: m["features"][1].update(position_weights=[1.0]), "feature 'item_id': position_weights: expected them for a weighted table alone", id="position weights"),
        pytest.param(lambda m: m["features"][1].update(position_weights=None), "feature 'item_id': position_weights: expected numbers, or no such key, got null", id="position weights null"),
        pytest.param(lambda m: (m["tables"][1].update(weighted=True), m["features"][1].update(position_weights=[1e39])), "feature 'item_id': position_weights: expected finite numbers of FP32", id="position weights beyond FP32"),
        pytest.param(lambda m: m["tables"][1].update(id_policy="modulo"), r"requires: expected \['modulo'\], which is what the bundle has, got \[\]", id="modulo not required"),
        pytest.param(lambda m: m.update(requires=["dense_part"]), r"requires: expected \[\], which is what the bundle has, got \['dense_part'\]", id="requires what it has not"),
        pytest.param(lambda m: m.update(requires=["lookups_by_name"]), "requires: this tbe-serving does not know 'lookups_by_name': serve the bundle", id="unknown requirement"),
        pytest.param(lambda m: m.update(requires=["lookups_by_name"], more={}), "requires: this tbe-serving does not know 'lookups_by_name'", id="unknown requirement and key"),
        pytest.param(lambda m: m.pop("requires"), "missing required field `requires`", id="requires is missing"),
        pytest.param(lambda m: m.update(requires="hosts"), r"Expected `array`, got `str` - at `\$.requires`", id="requires is text"),
        pytest.param(lambda m: m["tables"][1].update(pooling="NONE", weighted=True), "table 'item': pooling: expected SUM or MEAN of a weighted table", id="sequences with weights"),
        pytest.param(lambda m: m.update(format_version=11), "format_version: expected 10, got 11: serve it with the tbe-serving that exported it", id="newer format"),
        pytest.param(lambda m: m.update(format_version=11, more={}), "format_version: expected 10, got 11", id="newer format, new key"),
        pytest.param(lambda m: m.update(more=1), "unknown field `more`", id="unknown key"),
        pytest.param(lambda m: m["tables"][0].update(more=1), r"unknown field `more` - at `\$.tables\[0\]`", id="unknown key in a table"),
        pytest.param(lambda m: m.pop("plan"), "missing required field `plan`", id="missing key"),
        pytest.param(lambda m: m["tables"][0].update(dtype="INT3"), "INT3", id="unknown dtype"),
        pytest.param(lambda m: m["tables"][0].update(rows="many"), "Expected `int`, got `str`", id="wrong type"),
        pytest.param(lambda m: m["tables"][0].update(rows=10**6), "table 'user': its shards do not cover rows exactly once: look at row 500", id="rows"),
        pytest.param(lambda m: m["features"][0].update(table="none"), "feature 'user_id': no table 'none'", id="no such table"),
        pytest.param(lambda m: m["features"].append(m["features"][0]), "feature 'user_id': expected different names, got 2", id="feature twice"),
        pytest.param(lambda m: m.update(features=[]), "features: expected at least one", id="no features"),
        pytest.param(lambda m: m["plan"]["shards"].pop(), "table 'word': its shards do not cover", id="no shard"),
        pytest.param(lambda m: m["plan"]["shards"][0].update(rank=3), "table 'user': no rank 3", id="no rank"),
        pytest.param(lambda m: m["plan"]["shards"][3].update(offset_bytes=10**6), "table 'word': shard of .* bytes .* are outside", id="offset"),
        pytest.param(lambda m: m["plan"]["shards"][0].update(offset_bytes=-1), "table 'user': shard of .* bytes .* are outside", id="negative offset"),
        pytest.param(lambda m: m["plan"].update(row_alignment=16), "row_alignment: expected 1 on cpu, got 16", id="row alignment"),
        pytest.param(lambda m: m["plan"]["ranks"][0].update(device="cuda"), "cuda", id="another device"),
        pytest.param(lambda m: m["plan"]["ranks"][0].update(weights="../weights.0.bin"), "rank 0: files: .* leaves the bundle", id="path out of the bundle"),
        pytest.param(lambda m: m["files"].pop("model.py"), "files: expected", id="file without digest"),
        pytest.param(lambda m: m["files"].pop("program.pt"), r"requires: expected \['no_program'\]", id="program without digest"),
        pytest.param(lambda m: m["files"]["program.pt"].update(sha256="0" * 64), "program.pt: expected SHA-256 0000", id="digest"),
        pytest.param(lambda m: m["files"]["weights.0.bin"].update(size_bytes=10**8), "weights.0.bin: expected 100000000 bytes", id="size"),
    ],
)  # fmt: skip
def test_an_edited_manifest_is_refused(bundle: Path, change: Callable[[Any], None], message: str) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=message) as refused:
        open_bundle(bundle)
    assert str(bundle) in str(refused.value)


def rename(what: str, number: int, name: str) -> Callable[[Any], None]:
    """A table or a feature has another name, wherever it is named."""

    def change(manifest: Any) -> None:
        before = manifest[what][number]["name"]
        text = json.dumps(manifest).replace(json.dumps(before), json.dumps(name))
        manifest.clear()
        manifest.update(json.loads(text))

    return change


NAMES = [("a,b", "comma"), ("a\nb", "line"), ("\x7f", "delete"), ("a\x85", "C1"), ("", "empty")]


@pytest.mark.parametrize("what", ["tables", "features"])
@pytest.mark.parametrize("name", [pytest.param(name, id=what) for name, what in NAMES])
def test_a_name_that_cannot_be_listed_or_logged_is_refused(bundle: Path, what: str, name: str) -> None:
    edit(bundle, rename(what, 1, name))
    expected = re.escape(f"{what[:-1]} {name!r}: expected a name without commas and control characters")
    with pytest.raises(BundleError, match=expected):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["a,b", "a\nb", ""])
def test_a_key_must_be_a_valid_name(bundle: Path, name: str) -> None:
    edit(bundle, lambda m: m["features"][1].update(shared_key=name))
    with pytest.raises(BundleError, match=r"feature 'item_id': shared_key .* expected a name without commas"):
        open_bundle(bundle)


def test_null_is_refused_for_an_optional_key(bundle: Path) -> None:
    edit(bundle, lambda m: m["features"][1].update(shared_key=None))
    with pytest.raises(BundleError, match="feature 'item_id': shared_key: expected a name, or no such key, got null"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("single", "twice", "path"),
    [
        pytest.param('"format_version": 10', '"format_version": 10, "format_version": 10', "$.format_version", id="top"),
        pytest.param('"rows": 300', '"rows": 300, "rows": 300', "$.tables[1].rows", id="table"),
        pytest.param('"genre": "table_wise"', '"genre": "table_wise", "genre": "row_wise"', "$.plan.sharding.genre", id="map"),
        pytest.param('"worst_row"', '"worst_row": 1, "worst_row"', "$.parity[0].quantized.worst_row", id="deep"),
        pytest.param('"rows": 300', '"rows": 300, "ro\\u0077s": 300', "$.tables[1].rows", id="escaped"),
    ],
)  # fmt: skip
def test_a_key_that_is_there_twice_is_refused(bundle: Path, single: str, twice: str, path: str) -> None:
    """Readers differ in which of the two they take."""
    text = json.dumps(json.loads((bundle / "manifest.json").read_text()))
    assert single in text
    (bundle / "manifest.json").write_text(text.replace(single, twice, 1))
    with pytest.raises(BundleError, match=re.escape(f"expected each key once, got `{path}` twice")):
        open_bundle(bundle)


def moved(number: int, to: Callable[[Any], int]) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        shards = manifest["plan"]["shards"]
        shards[number]["offset_bytes"] = to(shards)

    return change


def as_dtype(dim: int, dtype: str) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["tables"][0].update(dim=dim, dtype=dtype)
        manifest["plan"]["shards"][0]["columns"] = [0, dim]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(moved(0, lambda s: s[1]["offset_bytes"]), r"table 'item': shard of rows [0, 300) × columns [0, 32) on rank 0: expected bytes of its own in weights.0.bin", id="the same bytes"),
        pytest.param(moved(1, lambda s: s[1]["offset_bytes"] - 128), r"inside table 'user': shard of rows [0, 500) × columns [0, 16) on rank 0", id="overlap"),
        pytest.param(moved(0, lambda _: 1), "table 'user': shard of rows [0, 500) × columns [0, 16) on rank 0: expected it at a multiple of 128 bytes in weights.0.bin, got 1", id="between"),
        pytest.param(moved(3, lambda _: 10**6), "table 'word': shard of rows [0, 1000) × columns [0, 24) on rank 0: bytes [1000000, ", id="outside"),
        pytest.param(as_dtype(15, "INT8"), "table 'user': expected a dim that is a multiple of 2 for INT8, got 15", id="odd int8"),
        pytest.param(as_dtype(6, "INT4"), "table 'user': expected a dim that is a multiple of 4 for INT4, got 6", id="int4"),
        pytest.param(as_dtype(12, "INT2"), "table 'user': expected a dim that is a multiple of 8 for INT2, got 12", id="int2"),
        pytest.param(lambda m: m["plan"].update(ranks=[], shards=[], sharding=dict.fromkeys(m["plan"]["sharding"], "data_parallel")), "plan: ranks: expected at least one", id="no ranks"),
        pytest.param(lambda m: m["plan"]["sharding"].pop("word"), "plan: sharding: expected each table once, got no table 'word'", id="table without sharding"),
        pytest.param(lambda m: m["plan"]["sharding"].update(words="row_wise"), "got another table 'words'", id="sharding without table"),
        pytest.param(lambda m: m["plan"]["shards"][2].update(table="no"), "plan: shard 2: no table 'no'", id="shard of no table"),
        pytest.param(lambda m: m["tables"].append(m["tables"][0]), "table 'user': expected different names, got 2", id="table twice"),
        pytest.param(lambda m: m["tables"][2].update(rows=0), "table 'genre': expected rows and dim > 0, got 0 × 8", id="no rows"),
        pytest.param(lambda m: [m["features"][n].update(shared_key="k") for n in (0, 2)], "feature 'recent_items': expected it beside the others of its key 'k'", id="key apart"),
        pytest.param(lambda m: m["files"].pop("model.py"), "files: expected each file of the bundle but its manifest and signature, got no 'model.py'", id="file without digest"),
        pytest.param(lambda m: m["files"].update({"x.py": m["files"]["model.py"]}), "got another 'x.py'", id="another file"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused_by_table_rank_or_shard(
    bundle: Path, change: Callable[[Any], None], message: str
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["model.py", "program.pt", "manifest.json", "manifest.sig"])
def test_other_files_of_a_bundle_are_refused_as_weights(bundle: Path, name: str) -> None:
    def take(manifest: Any) -> None:
        manifest["plan"]["ranks"][0]["weights"] = name
        weights = manifest["files"].pop("weights.0.bin")
        manifest["files"].setdefault(name, weights)
        manifest["files"][name]["size_bytes"] = 10**9

    edit(bundle, take)
    with pytest.raises(BundleError, match=f"rank 0: expected a file of weights, got '{name}'"):
        open_bundle(bundle)


def test_each_rank_has_a_file_of_its_own(repository: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(repository / "sharded" / "1", tmp_path / "1"))

    def share(manifest: Any) -> None:
        manifest["plan"]["ranks"][2]["weights"] = "weights.1.bin"
        del manifest["files"]["weights.2.bin"]
        manifest["files"]["weights.1.bin"]["size_bytes"] = 10**9

    edit(bundle, share)
    with pytest.raises(BundleError, match=r"rank 2: expected a file of weights of its own, .* also rank 1's"):
        open_bundle(bundle)


@pytest.mark.promise("A path that leads out of the bundle is refused")
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


def test_changed_weights_are_recognized_by_ctime(bundle: Path) -> None:
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


def test_a_missing_manifest_and_invalid_json_are_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"expected one of versions \[1\]"):
        open_bundle(tmp_path / "nowhere")
    (bundle / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match=r"manifest\.json: expected JSON, got \d+ bytes: Input data was truncated"):
        open_bundle(bundle)
