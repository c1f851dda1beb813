"""What a manifest says of a dense part is read strictly, and its file is compared with its digest."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export import export_model
from serving.bundle.opening import open_bundle
from serving.bundle.scores import SCORES
from serving.engine import Engine
from serving.errors import BundleError, InvalidRequest
from tests.support.scored import EXACT, dlrm


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(dlrm(), tmp_path_factory.mktemp("scores"), "m", EXACT)


@pytest.fixture
def bundle(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "1"))


def edit(bundle: Path, change: Callable[[Any], Any]) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def part(**changes: Any) -> Callable[[Any], Any]:
    return lambda manifest: manifest["dense_part"].update(changes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update(format_version=6), r"format_version 6 has no key `dense_part`, got it at `\$`"),
        (lambda m: m.pop("dense_part"), "files: expected each file of the bundle .* got another 'scores.pt'"),
        (lambda m: m["files"].pop(SCORES), "got no 'scores.pt'"),
        (lambda m: m["files"][SCORES].update(sha256="0" * 64), "scores.pt: expected SHA-256 0000"),
        (part(outputs=[]), "dense_part: outputs: expected at least one"),
        (part(dtype="FP8"), "dense_part.dtype"),
        (part(mixed_by="aten.sum.default"), "dense_part: mixed_by: expected it where mixes_samples is true alone"),
        (part(more=1), "unknown field `more`"),
        (part(inputs=[{"name": "values", "width": 1}]), "dense input 'values': expected a name of its own"),
        (part(inputs=[{"name": "a,b", "width": 1}]), "dense input 'a,b': expected a name of its own"),
        (part(inputs=2 * [{"name": "a", "width": 1}]), "dense input 'a': expected a name of its own"),
        (part(inputs=[{"name": "a", "width": 0}]), "dense input 'a': expected a width > 0, got 0"),
        (lambda m: m["dense_part"]["outputs"][0].update(name="embeddings"), "dense output 'embeddings': expected a name"),
        (lambda m: m["dense_part"]["outputs"][0].update(shape=[-1]), r"dense output 'scores': expected sizes > 0"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(bundle: Path, change: Callable[[Any], Any], why: str) -> None:
    open_bundle(bundle)
    edit(bundle, change)
    with pytest.raises(BundleError, match=why):
        open_bundle(bundle)


@pytest.mark.parametrize("at", [0, 5000, -1])
def test_a_changed_byte_of_scores_is_not_loaded(bundle: Path, at: int) -> None:
    opened = open_bundle(bundle)
    content = bytearray((bundle / SCORES).read_bytes())
    content[at] ^= 1
    (bundle / SCORES).write_bytes(content)
    for load in (lambda: open_bundle(bundle), lambda: Engine(opened)):
        with pytest.raises(BundleError, match=r"scores.pt: expected SHA-256"):
            load()


def test_a_file_that_is_no_torchscript_is_refused(bundle: Path) -> None:
    (bundle / SCORES).write_bytes(b"no program")
    digest = {"size_bytes": 10, "sha256": hashlib.sha256(b"no program").hexdigest()}
    edit(bundle, lambda manifest: manifest["files"].update({SCORES: digest}))
    with pytest.raises(BundleError, match=r"scores.pt: torch .* cannot load it"):
        Engine.open(bundle)


def test_a_bundle_without_a_dense_part_says_so(mixed: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no scores: export the model with --scores"):
        Engine.open(mixed).score({"user_id": [[1]]})
