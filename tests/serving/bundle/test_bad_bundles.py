"""Whatever happens to a bundle's bytes: it is refused by name, or answers as before; never otherwise."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, IdPolicy, Sharding, WeightDtype, export_model
from serving.bundle.load import open_bundle, verify_digests
from serving.bundle.manifest import MANIFEST, MODEL, PROGRAM, Manifest
from serving.bundle.tensor_names import EMBEDDINGS
from serving.engine import Engine
from serving.errors import BundleError
from serving.requests.types import Tensors
from tests.support.json_edits import edits
from tests.support.models import MIXED, collection

pytestmark = pytest.mark.promise("A damaged bundle is refused by name before it serves")

Change = Callable[[Path], None]

CONFIG = ExportConfig(
    dtype={
        "user": WeightDtype.INT8,
        "item": WeightDtype.INT4,
        "genre": WeightDtype.FP16,
        "word": WeightDtype.INT2,
    },
    id_policy={"word": IdPolicy.ZERO},
    sharding=Sharding(ranks=2, types={"*": "row_wise", "genre": "table_wise"}),
)

WEIGHTS = ("weights.0.bin", "weights.1.bin")

CODE = (MODEL, PROGRAM)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, every dtype, both id policies."""
    return export_model(collection(MIXED), tmp_path_factory.mktemp("whole") / "r", "m", CONFIG)


@pytest.fixture(scope="module")
def other_bundle(tmp_path_factory: pytest.TempPathFactory, original: Path) -> Path:
    """The same tables with other weights: files of the same names and sizes."""
    module = collection(MIXED)
    for weights in module.parameters():
        weights.data.mul_(-1)
    bundle = export_model(module, tmp_path_factory.mktemp("other") / "r", "m", CONFIG)
    assert (bundle / WEIGHTS[0]).stat().st_size == (original / WEIGHTS[0]).stat().st_size
    return bundle


def probe(manifest: Manifest) -> Tensors:
    """Two ids of every feature, in every part of its table."""
    samples = 8
    values = [np.linspace(0, table.rows - 1, 2 * samples).astype(np.int64) for table in manifest.feature_tables]
    lengths = np.full(samples * len(values), 2, np.int32)
    return Tensors(None, np.concatenate(values), lengths, None)


@pytest.fixture(scope="module")
def expected(original: Path) -> "np.ndarray[Any, Any]":
    engine = Engine.open(original)
    return engine.outputs(probe(engine.bundle.manifest))[EMBEDDINGS]


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "1"))


def outcome(bundle: Path, request: Tensors, expected: "np.ndarray[Any, Any]") -> str:
    """`refused` or `right`, of a version loaded as the backend loads it; fails for everything else."""
    refused = None
    try:
        opened = open_bundle(bundle)
        verify_digests(opened)
        engine = Engine(opened)
    except BundleError as error:
        refused = str(error)
    if refused is not None:
        assert str(bundle) in refused
        assert "\n" not in refused
        return "refused"
    np.testing.assert_array_equal(engine.outputs(request)[EMBEDDINGS], expected)
    return "right"


def positions(size: int, count: int) -> list[int]:
    """Bytes spread over a file, the first and last among them."""
    return sorted({*np.linspace(0, size - 1, count).astype(int).tolist()})


@pytest.mark.parametrize("name", [*CODE, *WEIGHTS])
def test_a_flipped_bit_anywhere_is_refused(bundle: Path, name: str, expected: "np.ndarray[Any, Any]") -> None:
    """Scales, biases, codes, floats, what lies between shards, and code."""
    request = probe(open_bundle(bundle).manifest)
    path = bundle / name
    whole = path.read_bytes()
    for number, position in enumerate(positions(len(whole), 150)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << number % 8
        path.write_bytes(flipped)
        assert outcome(bundle, request, expected) == "refused", position
    path.write_bytes(whole)
    assert outcome(bundle, request, expected) == "right"


def test_a_flipped_bit_of_the_manifest_is_refused_or_harmless(bundle: Path, expected: "np.ndarray[Any, Any]") -> None:
    request = probe(open_bundle(bundle).manifest)
    whole = (bundle / MANIFEST).read_bytes()
    outcomes = []
    for number, position in enumerate(positions(len(whole), 400)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << number % 8
        (bundle / MANIFEST).write_bytes(flipped)
        outcomes.append(outcome(bundle, request, expected))
    assert outcomes.count("refused") > 200
    assert outcomes.count("right") > 5  # a digit of how well it agreed


def resized(path: Path) -> Iterator[bytes]:
    whole = path.read_bytes()
    last = whole.rstrip()[:-1]  # of the manifest, the brace: it may do without the end of its line
    yield from (b"", whole[:1], whole[: len(whole) // 2], last, whole + b"\0", whole + whole, bytes(len(whole)))


@pytest.mark.parametrize("name", [MANIFEST, *CODE, *WEIGHTS])
def test_a_file_that_is_cut_emptied_or_longer_is_refused(
    bundle: Path, name: str, expected: "np.ndarray[Any, Any]"
) -> None:
    request = probe(open_bundle(bundle).manifest)
    for content in list(resized(bundle / name)):
        (bundle / name).write_bytes(content)
        assert outcome(bundle, request, expected) == "refused", content[:20]


def swap(one: str, other: str) -> Change:
    def change(bundle: Path) -> None:
        (bundle / one).rename(bundle / "swapped")
        (bundle / other).rename(bundle / one)
        (bundle / "swapped").rename(bundle / other)

    return change


def is_folder(name: str) -> Change:
    def change(bundle: Path) -> None:
        (bundle / name).unlink()
        (bundle / name).mkdir()

    return change


def is_fifo(name: str) -> Change:
    def change(bundle: Path) -> None:
        (bundle / name).unlink()
        os.mkfifo(bundle / name)

    return change


def links_to_itself(name: str) -> Change:
    def change(bundle: Path) -> None:
        (bundle / name).unlink()
        (bundle / name).symlink_to(name)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(swap(*WEIGHTS), id="ranks swapped"),
        pytest.param(swap(*CODE), id="code swapped"),
        pytest.param(swap(MANIFEST, PROGRAM), id="manifest and program swapped"),
        *(pytest.param(is_folder(name), id=f"{name} a folder") for name in (MANIFEST, *CODE, *WEIGHTS)),
        *(pytest.param(is_fifo(name), id=f"{name} a pipe") for name in (MANIFEST, *CODE, *WEIGHTS)),
        *(pytest.param(links_to_itself(name), id=f"{name} a loop") for name in (MANIFEST, *CODE, *WEIGHTS)),
        pytest.param(lambda b: shutil.rmtree(b), id="gone"),
    ],
)
def test_changed_files_are_refused(bundle: Path, change: Change, expected: "np.ndarray[Any, Any]") -> None:
    request = probe(open_bundle(bundle).manifest)
    change(bundle)
    assert outcome(bundle, request, expected) == "refused"


@pytest.mark.parametrize("name", [MANIFEST, *WEIGHTS])
def test_a_file_of_another_export_of_the_same_tables_is_refused(
    bundle: Path, other_bundle: Path, name: str, expected: "np.ndarray[Any, Any]"
) -> None:
    request = probe(open_bundle(bundle).manifest)
    shutil.copy(other_bundle / name, bundle / name)
    assert outcome(bundle, request, expected) == "refused"


def test_an_edited_manifest_is_refused_or_changes_no_answer(bundle: Path, expected: "np.ndarray[Any, Any]") -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    request = probe(open_bundle(bundle).manifest)
    every = list(edits(manifest))
    random = np.random.default_rng(0)
    outcomes = []
    for number in random.permutation(len(every))[:600]:
        (bundle / MANIFEST).write_text(json.dumps(every[number]))
        outcomes.append(outcome(bundle, request, expected))
    assert len(every) > 1000
    assert outcomes.count("refused") > 400
    assert outcomes.count("right") > 5


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"[" * 200_000, id="deep list"),
        pytest.param(b'{"features":' * 100_000, id="deep object"),
        pytest.param(b'{"format_version": 10, "requires": [], "features": ' + b"[" * 200_000, id="deep inside"),
        pytest.param(b"\xff\xfe" * 100, id="no UTF-8"),
        pytest.param(b'{"format_version": 10', id="half"),
        pytest.param(b'{"format_version": 1e999}', id="infinite"),
        pytest.param(b"3", id="a number"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="nothing"),
    ],
)
def test_files_that_are_no_manifest_are_refused(
    bundle: Path, content: bytes, expected: "np.ndarray[Any, Any]"
) -> None:
    request = probe(open_bundle(bundle).manifest)
    (bundle / MANIFEST).write_bytes(content)
    assert outcome(bundle, request, expected) == "refused"


def test_a_program_compiled_for_another_manifest_is_refused(original: Path, tmp_path: Path) -> None:
    """Every digest agrees: only what the program says of itself tells that it reads other bytes."""
    module = collection(MIXED)
    other = export_model(module, tmp_path / "r", "m", replace(CONFIG, sharding=Sharding(ranks=1)))
    bundle = Path(shutil.copytree(original, tmp_path / "mixed up"))
    shutil.copy(other / PROGRAM, bundle / PROGRAM)
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["files"][PROGRAM] = json.loads((other / MANIFEST).read_text())["files"][PROGRAM]
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    verify_digests(open_bundle(bundle))
    with pytest.raises(
        BundleError, match=r"program\.pt: was compiled for another manifest: publish the bundle again"
    ):
        Engine.open(bundle)
