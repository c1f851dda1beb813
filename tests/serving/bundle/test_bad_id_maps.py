"""Bundles whose maps of raw ids are damaged are refused before anything is looked up."""

import json
import os
from collections.abc import Callable
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import export_model
from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.load import digest_file, open_bundle, verify_digests
from serving.bundle.manifest import MANIFEST
from serving.engine import Engine
from serving.errors import BundleError, InternalError
from tests.serving.test_id_maps import FP32
from tests.support.commands import tbe_export
from tests.support.managed_collision import managed
from tests.support.models import collection


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return export_model(managed(), tmp_path / "r", "m", FP32)


def test_a_map_of_another_size_is_refused(bundle: Path) -> None:
    size = (bundle / ID_MAPS_FILE).stat().st_size
    for wrong in (size - 1, size + 1, 0):
        os.truncate(bundle / ID_MAPS_FILE, wrong)
        with pytest.raises(BundleError, match=rf"ids\.bin: expected {size} bytes, got {wrong}: publish"):
            Engine.open(bundle)
    (bundle / ID_MAPS_FILE).unlink()
    with pytest.raises(BundleError, match=r"ids\.bin: cannot be read"):
        Engine.open(bundle)


def test_a_map_with_other_bytes_is_found_by_its_digest(bundle: Path) -> None:
    _write(bundle / ID_MAPS_FILE, 8, [(bundle / ID_MAPS_FILE).read_bytes()[8] ^ 1])
    with pytest.raises(BundleError, match=r"ids\.bin: expected SHA-256"):
        verify_digests(open_bundle(bundle))
    assert tbe_export("verify", str(bundle)).exit_code == 1


def test_a_map_to_rows_outside_of_the_table_never_reaches_fbgemm(bundle: Path) -> None:
    engine = Engine.open(bundle)
    for table in engine.bundle.manifest.tables:
        assert table.id_map is not None
        rows = np.fromfile(
            bundle / ID_MAPS_FILE, "<i8", 2 * table.id_map.capacity, offset=table.id_map.entries_offset
        )
        rows[1::2] = table.rows
        _write(bundle / ID_MAPS_FILE, table.id_map.entries_offset, rows.tobytes())
    with pytest.raises(InternalError, match=r"ids\.bin: expected rows of its tables, got others"):
        engine.lookup({"user_id": [[0, 1_000_003**2]], "words": [list(range(50))], "item_id": [[-1]]})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        pytest.param("known", 10**6, "no more known ids than entries", id="more known than entries"),
        pytest.param("capacity", 0, "expected up to", id="no entries"),
        pytest.param("capacity", 10**6, "are outside of it", id="more entries than bytes"),
        pytest.param("buckets", 2**33, "expected up to", id="too many buckets"),
        pytest.param("seeds_offset", -128, "are outside of it", id="before the file"),
        pytest.param("seeds_offset", 1, "expected them at a multiple of 128 bytes", id="not aligned"),
        pytest.param("entries_offset", 0, "expected bytes of their own", id="over others"),
        pytest.param("hashed", None, "expected a map, or no such key, got null", id="null"),
        pytest.param("hashed", {"bounds": [0, 30, 30, 60]}, "expected bounds that rise from 0 to 60", id="empty bucket"),
        pytest.param("hashed", {"bounds": [0, 59]}, "expected bounds that rise from 0 to 60", id="too few rows"),
    ],
)  # fmt: skip
def test_a_map_that_contradicts_itself_is_refused(bundle: Path, key: str, value: Any, message: str) -> None:
    _edit(bundle, lambda manifest: manifest["tables"][1]["id_map"].__setitem__(key, value))
    with pytest.raises(BundleError, match=f"table 'item'.*{message}"):
        open_bundle(bundle)


def test_a_map_needs_its_requirement_and_the_policy_error(bundle: Path) -> None:
    _edit(bundle, lambda manifest: manifest.__setitem__("requires", []))
    with pytest.raises(
        BundleError, match=r"requires: expected \['id_maps'\], which is what the bundle has, got \[\]"
    ):
        open_bundle(bundle)
    _edit(bundle, lambda manifest: manifest.__setitem__("requires", ["id_maps"]))
    _edit(bundle, lambda manifest: manifest["tables"][0].__setitem__("id_policy", "zero"))
    with pytest.raises(BundleError, match="expected id_policy `error` with an id_map"):
        open_bundle(bundle)


def test_a_bundle_without_maps_may_not_have_the_file(tmp_path: Path) -> None:
    bundle = export_model(collection(), tmp_path / "r", "m")
    assert open_bundle(bundle).manifest.requires == ()
    (bundle / ID_MAPS_FILE).write_bytes(b"12345678")
    digest = digest_file(bundle / ID_MAPS_FILE)
    _edit(bundle, lambda m: m["files"].__setitem__(ID_MAPS_FILE, {"size_bytes": 8, "sha256": digest.sha256}))
    with pytest.raises(BundleError, match=r"got another 'ids\.bin'"):
        open_bundle(bundle)


def _edit(bundle: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def _write(path: Path, offset: int, content: Several[int] | bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(content))
