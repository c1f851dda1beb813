"""What a manifest says of a dense part is read strictly, and its file is compared with its digest."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import export_model
from serving.bundle.load import open_bundle
from serving.bundle.scores import EXPORTED_SCORES, SCORES
from serving.engine import Engine
from serving.errors import BundleError, InvalidRequest
from tests.support.history_model import with_histories
from tests.support.json_edits import edits
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT, dlrm
from tests.support.sequence_models import FP32, Mixed


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


def user_side(names: list[str], per_user: int = 1) -> dict[str, Any]:
    return {"names": names, "per_user": per_user, "operators": 2, "left_alone": []}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update(requires=[]), r"requires: expected \['dense_files', 'dense_part'\], which is what the bundle has, got \[\]"),
        (lambda m: m.pop("dense_part"), "files: expected each file of the bundle .* got another 'scores.pt"),
        (lambda m: m["files"].pop(SCORES), "got no 'scores.pt'"),
        (lambda m: m["files"][SCORES].update(sha256="0" * 64), "scores.pt: expected SHA-256 0000"),
        (part(outputs=[]), "dense_part: outputs: expected at least one"),
        (part(dtype="FP8"), "dense_part.dtype"),
        (part(mixed_by="aten.sum.default"), "dense_part: mixed_by: expected it where mixes_samples is true alone"),
        (part(files=[{"name": SCORES, "format": "TORCHSCRIPT"}]), "got another 'scores.pt2'"),
        (part(files=[{"name": "a.pt", "format": "TORCHSCRIPT"}]), "files: expected a name that begins with 'scores.', once"),
        (part(files=2 * [{"name": SCORES, "format": "TORCHSCRIPT"}]), "expected a name that begins with 'scores.', once"),
        (part(files=[{"name": "scores.a/b", "format": "TORCHSCRIPT"}]), "expected a name that begins with 'scores.', once"),
        (part(files=[{"name": SCORES, "format": "ONNX"}]), r"Invalid enum value 'ONNX' - .*files\[0\].format"),
        (part(files=[{"name": SCORES, "format": "TORCHSCRIPT", "relative_time": 0}]), "relative_time: expected a number > 0"),
        (part(files=[{"name": "scores.pt2", "format": "EXPORTED_PROGRAM"}]), "got another 'scores.pt'"),
        (part(files=[{"name": SCORES, "format": "TORCHSCRIPT", "torch": "2.13.0"}]), "expected neither instructions nor torch for TORCHSCRIPT, got None and '2.13.0'"),
        (part(files=[{"name": "scores.x.zip", "format": "AOTINDUCTOR"}]), "expected both instructions and torch for AOTINDUCTOR, got None and None"),
        (part(files=[{"name": "scores.x.zip", "format": "AOTINDUCTOR", "torch": "2.13.0"}]), "expected both instructions and torch for AOTINDUCTOR, got None and '2.13.0'"),
        (part(files=[{"name": "scores.x.zip", "format": "AOTINDUCTOR", "torch": "2", "instructions": "x"}]), "expected another format beside AOTIN"),
        (part(more=1), "unknown field `more`"),
        (part(user_side=user_side(["f0"])), "got no 'scores.items.pt'"),
        (part(user_side=user_side([])), r"user_side: names: expected keys and dense inputs, each once, got \[\]"),
        (part(user_side=user_side(["f0", "f0"])), "user_side: names: expected keys and dense inputs, each once"),
        (part(user_side=user_side(["nobody"])), "user_side: names: expected keys and dense inputs, each once"),
        (part(user_side=user_side(["f0"], per_user=3)), "user_side: per_user: expected 0 to 2, got 3"),
        (part(user_side=user_side(["f0"]) | {"fewest_items": 0}), "user_side: fewest_items: expected a number > 0, got 0"),
        (part(user_side=user_side(["f0"]), mixes_samples=True), "user_side: expected it only with FP32 weights"),
        (part(user_side=user_side(["f0"]), dtype="BF16"), "user_side: expected it only with FP32 weights"),
        (part(files=[{"name": "scores.user.pt", "format": "TORCHSCRIPT"}]), "got 'scores.user.pt'"),
        (part(inputs=[{"name": "values", "shape": [1]}]), "dense input 'values': expected a name of its own"),
        (part(inputs=[{"name": "a,b", "shape": [1]}]), "dense input 'a,b': expected a name of its own"),
        (part(inputs=2 * [{"name": "a", "shape": [1]}]), "dense input 'a': expected a name of its own"),
        (part(inputs=[{"name": "a", "shape": [2, 0]}]), r"dense input 'a': expected sizes > 0, got \[2, 0\]"),
        (part(inputs=[{"name": "a", "shape": [1], "dtype": "INT64", "rows": 0}]), "rows: expected a number > 0, of integers"),
        (part(inputs=[{"name": "a", "shape": [1], "rows": 5}]), "rows: expected a number > 0, of integers alone, got 5"),
        (part(inputs=[{"name": "a", "shape": 31 * [1]}]), "dense input 'a': expected at most 30 sizes, got 31"),
        (part(inputs=[{"name": "a", "shape": [1], "dtype": "FP16"}]), r"Invalid enum value 'FP16' - .*inputs\[0\].dtype"),
        (part(inputs=[{"name": "a", "width": 1}]), r"unknown field `width` - at `\$.dense_part.inputs\[0\]`"),
        (part(jagged=[{"kind": "ROWS", "name": "f0"}]), "jagged: ROWS of 'f0': expected a feature that is not pooled, once"),
        (part(jagged=[{"kind": "IDS", "name": "f9"}]), "jagged: IDS of 'f9': expected a key that has them, once"),
        (part(jagged=[{"kind": "WEIGHTS", "name": "f0"}]), "jagged: WEIGHTS of 'f0': expected a key that has them, once"),
        (part(jagged=2 * [{"kind": "LENGTHS", "name": "f0"}]), "jagged: LENGTHS of 'f0': expected a key that has them, once"),
        (part(jagged=[{"kind": "VALUES", "name": "f0"}]), r"Invalid enum value 'VALUES' - at `\$.dense_part.jagged\[0\].kind`"),
        (part(fixed_lengths={"f0": 0}), "fixed_lengths: 'f0': expected a key, and a length > 0, got 0"),
        (part(fixed_lengths={"f9": 1}), "fixed_lengths: 'f9': expected a key"),
        (part(together=[["f0"]]), r"together: expected groups of two keys or more, each key in one, got \(\('f0',\),\)"),
        (part(together=[["f0", "f9"]]), "together: expected groups of two keys or more"),
        (part(together=[["f0", "f1"], ["f2", "f1"]]), "together: expected groups of two keys or more, each key in one"),
        (part(inputs=[{"name": "a", "shape": [], "key": "f9"}]), "dense input 'a': key: expected one of the bundle's, got 'f9'"),
        (part(inputs=[{"name": "a", "shape": [], "key": "f0"}]), r"jagged: expected NUMBERS of \['a'\], once each, got \[\]"),
        (part(jagged=[{"kind": "NUMBERS", "name": "a"}]), r"jagged: expected NUMBERS of \[\], once each, got \['a'\]"),
        (lambda m: m["dense_part"]["outputs"][0].update(key="f9"), "dense output 'scores': key: expected one of the bundle's"),
        (lambda m: m["dense_part"]["outputs"][0].update(key="f0"), "dense output 'scores': expected a jagged input with a row"),
        (lambda m: m["dense_part"]["outputs"][0].update(name="embeddings"), "dense output 'embeddings': expected a name"),
        (lambda m: m["dense_part"]["outputs"][0].update(shape=[-1]), r"dense output 'scores': expected sizes > 0"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(bundle: Path, change: Callable[[Any], Any], why: str) -> None:
    open_bundle(bundle)
    edit(bundle, change)
    with pytest.raises(BundleError, match=why):
        open_bundle(bundle)


@pytest.mark.parametrize("some", one_in(2, [60, 600]))
def test_an_edited_dense_part_is_refused_by_name_or_loads(tmp_path: Path, some: int) -> None:
    bundle = with_histories(export_model(Mixed(), tmp_path / "r", "m", FP32), fixed_lengths={"seen": 2})
    manifest = json.loads((bundle / "manifest.json").read_text())
    every = list(edits(manifest["dense_part"]))
    refused = []
    for number in np.random.default_rng(0).permutation(len(every))[:some]:
        (bundle / "manifest.json").write_text(json.dumps({**manifest, "dense_part": every[number]}))
        try:
            Engine(open_bundle(bundle))
        except BundleError as error:
            refused.append(str(error))
    assert len(refused) > some // 2
    for said in refused:
        assert str(bundle) in said
        assert "\n" not in said


@pytest.mark.parametrize("name", [SCORES, EXPORTED_SCORES])
@pytest.mark.parametrize("position", [0, 5000, -1])
def test_a_changed_byte_of_scores_is_not_loaded(bundle: Path, position: int, name: str) -> None:
    """Nor is another file loaded in its place, although it would answer alike."""
    opened = open_bundle(bundle)
    content = bytearray((bundle / name).read_bytes())
    content[position] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name}: expected SHA-256"):
        open_bundle(bundle)
    if name == SCORES:
        with pytest.raises(BundleError, match=r"scores.pt: expected SHA-256"):
            Engine(opened)


def no_program(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes(b"no program")
    digest = {"size_bytes": 10, "sha256": hashlib.sha256(b"no program").hexdigest()}
    edit(bundle, lambda manifest: manifest["files"].update({name: digest}))


def test_the_next_file_serves_if_torch_cannot_load_one(bundle: Path) -> None:
    no_program(bundle, SCORES)
    loaded = Engine.open(bundle).dense_part
    assert loaded is not None
    assert loaded.file.name == EXPORTED_SCORES
    assert re.fullmatch(rf"{bundle}/scores.pt: torch [^ ]+ cannot load it: [A-Za-z]+: .*", loaded.failures[0])


def test_files_that_torch_cannot_load_are_refused(bundle: Path) -> None:
    no_program(bundle, SCORES)
    no_program(bundle, EXPORTED_SCORES)
    with pytest.raises(
        BundleError, match=r"scores.pt: torch .* cannot load it: .*; .*scores.pt2: torch .* cannot load"
    ):
        Engine.open(bundle)


def test_a_bundle_without_a_dense_part_says_so(mixed: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no scores: export the model with --scores"):
        Engine.open(mixed).score({"user_id": [[1]]})
