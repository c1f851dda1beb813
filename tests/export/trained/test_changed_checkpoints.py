"""A checkpoint that changes while it is read: it is refused, and what is served is of one save."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection

from export import (
    ExportConfig,
    Sharding,
    WeightDtype,
    complete_hosts,
    export_hosts,
    export_model,
    export_next,
    publish_changes,
)
from export.errors import CheckpointError, PublishError
from export.parity.verify import ComparedModel, verify
from export.pipeline import plan_model
from export.trained.checkpoint import open_checkpoint
from export.trained.tables import collect_tables
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection
from tests.support.scored_models import dlrm

SPECS = [Spec(name, 500, 8, "SUM", (name,)) for name in ("a", "b")]
EXACT = ExportConfig(dtype={"*": WeightDtype.FP32})


def bags() -> EmbeddingBagCollection:
    return collection(SPECS)


def state(number: float) -> dict[str, Tensor]:
    """A save: every number of it is `number`."""
    return {f"embedding_bags.{spec.name}.weight": torch.full((500, 8), float(number)) for spec in SPECS}


def torch_file(folder: Path, number: float) -> Path:
    torch.save(state(number), folder / "w.pt")
    return folder / "w.pt"


def safetensors_file(folder: Path, number: float) -> Path:
    save_file(state(number), folder / "w.safetensors")
    return folder / "w.safetensors"


def safetensors_set(folder: Path, number: float) -> Path:
    (folder / "set").mkdir(exist_ok=True)
    places = {key: f"{part}.safetensors" for part, key in enumerate(state(number))}
    for key, name in places.items():
        save_file({key: state(number)[key]}, folder / "set" / name)
    (folder / "set" / "m.safetensors.index.json").write_text(str({"weight_map": places}).replace("'", '"'))
    return folder / "set"


def dcp_folder(folder: Path, number: float) -> Path:
    save(state(number), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


Save = Callable[[Path, float], Path]
SAVES = [torch_file, safetensors_file, safetensors_set, dcp_folder]


def data_file(checkpoint: Path) -> Path:
    """A file with numbers of a checkpoint."""
    if checkpoint.is_file():
        return checkpoint
    return min(path for path in checkpoint.iterdir() if path.suffix in (".safetensors", ".distcp"))


def age(checkpoint: Path) -> None:
    """Let the files be old: a file system may not tell apart two times within some milliseconds."""
    for path in [checkpoint] if checkpoint.is_file() else checkpoint.iterdir():
        os.utime(path, ns=(10**18, 10**18))


def other_numbers(save: Save, scratch: Path) -> bytes:
    """What the file would be in another save."""
    scratch.mkdir()
    return data_file(save(scratch, 2)).read_bytes()


def replaced(file: Path, content: bytes) -> None:
    Path(f"{file}.part").write_bytes(content)
    os.replace(f"{file}.part", file)


def rewritten(file: Path, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.write(content)


def appended(file: Path, _: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(10))


def cut(file: Path, content: bytes) -> None:
    os.truncate(file, len(content) // 2)


def removed(file: Path, _: bytes) -> None:
    file.unlink()


@pytest.mark.parametrize("change", [replaced, rewritten, appended, cut, removed])
@pytest.mark.parametrize("save", SAVES)
def test_a_file_that_changes_is_named(tmp_path: Path, save: Save, change: Callable[[Path, bytes], None]) -> None:
    path = save(tmp_path, 1)
    age(path)
    checkpoint = open_checkpoint(path)
    table = collect_tables(bags()).tables[0]
    assert (checkpoint.rows(table, 0, 500) == 1).all()
    checkpoint.check_unchanged()
    file = data_file(path)
    change(file, other_numbers(save, tmp_path / "other"))
    with pytest.raises(CheckpointError, match=f"{file.name}: .* while it was read"):
        checkpoint.check_unchanged()
    if change in (replaced, removed):  # what was opened stays what it was
        assert (checkpoint.rows(table, 0, 500) == 1).all()


@pytest.mark.parametrize("save", SAVES)
def test_rows_that_are_cut_off_are_refused_as_they_are_read(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, 1)
    checkpoint = open_checkpoint(path)
    os.truncate(data_file(path), 100)
    a, b = collect_tables(bags()).tables
    with pytest.raises(CheckpointError, match=r"bytes and has 100 while it was read"):
        (checkpoint.rows(a, 0, 500), checkpoint.rows(b, 0, 500))


def test_a_view_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """A table that is a view is read in pieces."""
    views = {key: tensor.T.contiguous().T for key, tensor in state(1).items()}
    torch.save(views, tmp_path / "w.pt")
    checkpoint = open_checkpoint(tmp_path / "w.pt")
    os.truncate(tmp_path / "w.pt", 2000)
    with pytest.raises(CheckpointError, match="has 2,000 while it was read"):
        checkpoint.rows(collect_tables(bags()).tables[1], 0, 500)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata.tmp"])
def test_a_file_that_is_added_to_a_folder_is_named(tmp_path: Path, name: str) -> None:
    path = dcp_folder(tmp_path, 1)
    checkpoint = open_checkpoint(path)
    (path / "training.log").write_text("step 3")  # no file of a checkpoint
    checkpoint.check_unchanged()
    (path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{name}: was added while it was read"):
        checkpoint.check_unchanged()


def test_a_changed_file_is_recognized_despite_its_old_time(tmp_path: Path) -> None:
    """Tools that copy files set their times."""
    path = torch_file(tmp_path, 1)
    age(path)
    checkpoint = open_checkpoint(path)
    rewritten(path, other_numbers(torch_file, tmp_path / "other"))
    age(path)
    with pytest.raises(CheckpointError, match="while it was read"):
        checkpoint.check_unchanged()


# --- every command that reads a checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = torch_file(tmp_path, 1)
    age(path)
    return path


def overwriting(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have a training save again as soon as rows of the second table are read."""
    from export.trained.checkpoint import Checkpoint

    read_rows = Checkpoint.rows

    def rows(self: Checkpoint, table: Any, start: int, stop: int) -> Tensor:
        if table.name == "b":
            replaced(path, other_numbers(torch_file, path.parent / os.urandom(4).hex()))
        return read_rows(self, table, start, stop)

    monkeypatch.setattr(Checkpoint, "rows", rows)


def export_fp32(path: Path, repository: Path) -> None:
    export_model(bags(), repository, "m", EXACT, checkpoint=path)


def export_int8(path: Path, repository: Path) -> None:
    export_model(bags(), repository, "m", checkpoint=path)


def plan(path: Path, _: Path) -> None:
    plan_model(bags(), ExportConfig(max_error={"*": 1.0}), checkpoint=path)


def changes(path: Path, repository: Path) -> None:
    publish_changes(repository, "m", bags(), checkpoint=path)


def next_version(path: Path, repository: Path) -> None:
    export_next(bags(), repository, "m", checkpoint=path)


def verification(path: Path, repository: Path) -> None:
    verify(repository / "m" / "1", ComparedModel(collect_tables(bags()), path))


@pytest.mark.parametrize("act", one_in(2, [export_int8, export_fp32, plan, changes, next_version, verification]))
def test_every_command_refuses_a_checkpoint_that_changes(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path, Path], None]
) -> None:
    export_model(bags(), tmp_path / "r", "m", checkpoint=saved)
    before = sorted(path for path in tmp_path.rglob("*") if "r" in path.relative_to(tmp_path).parts[0])
    overwriting(monkeypatch, saved)
    with pytest.raises(CheckpointError, match=r"w\.pt: was replaced by another file while it was read"):
        act(saved, tmp_path / "r")
    assert before == sorted(path for path in tmp_path.rglob("*") if "r" in path.relative_to(tmp_path).parts[0])


def test_scores_are_not_exported_from_a_changing_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows would be of one save, and what follows them of another."""
    from export.trained.checkpoint import Checkpoint

    model = dlrm()
    path = tmp_path / "w.pt"
    torch.save(model.state_dict(), path)
    age(path)
    other = {key: number + 1 for key, number in model.state_dict().items()}
    read_rows = Checkpoint.rows

    def rows(self: Checkpoint, table: Any, start: int, stop: int) -> Tensor:
        stored = read_rows(self, table, start, stop)
        part = tmp_path / os.urandom(4).hex()  # rows are read by several threads
        torch.save(other, part)
        os.replace(part, path)
        return stored

    monkeypatch.setattr(Checkpoint, "rows", rows)
    with pytest.raises(CheckpointError, match=r"w\.pt: was replaced by another file while it was read"):
        export_model(dlrm(), tmp_path / "r", "m", replace(EXACT, scores=True), checkpoint=path)
    assert not (tmp_path / "r" / "m").exists()


# --- hosts of one router, exported at two moments


HOSTS = replace(EXACT, sharding=Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"}, hosts_as_models=True))


@pytest.mark.parametrize("save", one_in(4, SAVES))
def test_hosts_of_two_saves_are_not_completed(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, 1)
    age(path)
    export_hosts(bags(), tmp_path / "r", "m", [0], HOSTS, 1, checkpoint=path)
    save(tmp_path, 2)
    export_hosts(bags(), tmp_path / "r", "m", [1], HOSTS, 1, checkpoint=path)
    with pytest.raises(
        PublishError, match=r"host 0: .*: expected one that was exported from the checkpoint given here"
    ):
        complete_hosts(bags(), tmp_path / "r", "m", HOSTS, 1, checkpoint=path)
    with pytest.raises(
        PublishError, match=r"host 1: .*from the checkpoint given here, the module itself, got one from c"
    ):
        complete_hosts(bags(), tmp_path / "r", "m", HOSTS, 1)
    assert not (tmp_path / "r" / "m").exists()


@pytest.mark.parametrize("save", one_in(2, SAVES))
def test_machines_with_a_copy_each_are_completed(tmp_path: Path, save: Save) -> None:
    """Copies of archives may have other times. Files of safetensors need theirs: they have no sums of their numbers."""
    path = save(tmp_path, 1)
    age(path)
    export_hosts(bags(), tmp_path / "r", "m", [0], HOSTS, 1, checkpoint=path)
    keep_times = save in (safetensors_file, safetensors_set)
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    copy_file = shutil.copy2 if keep_times else shutil.copy
    (shutil.copytree(path, copy, copy_function=copy_file) if path.is_dir() else copy_file(path, copy))
    export_hosts(bags(), tmp_path / "r", "m", [1], HOSTS, 1, checkpoint=copy)
    bundle = complete_hosts(bags(), tmp_path / "r", "m", HOSTS, 1, checkpoint=copy)
    fingerprint = open_bundle(bundle).manifest.checkpoint
    assert fingerprint == open_checkpoint(path).fingerprint


def test_a_changed_file_without_checksums_is_recognized_by_its_time(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = torch_file(tmp_path, 1)
        age(path)
        before = open_checkpoint(path).fingerprint
        torch_file(tmp_path, 2)
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_checkpoint(path).fingerprint != before


def test_a_bundle_of_the_module_itself_has_no_fingerprint(tmp_path: Path) -> None:
    bundle = export_model(bags(), tmp_path / "r", "m", EXACT)
    assert open_bundle(bundle).manifest.checkpoint is None
    with Engine.open(bundle) as engine:
        np.testing.assert_array_equal(engine.rows("a", [3])[0], bags().state_dict()["embedding_bags.a.weight"][3])
