"""A private folder holds what a trusted key signed, and nothing else gets run or served."""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from export import export_model
from serving.bundle.load import in_use, open_bundle
from serving.engine import Engine
from serving.errors import ServingError
from serving.server import run_server
from serving.server.private_folder import Trust, private_folder
from tests.support.attackers import Target, add_code, answers, expected_files, flip, row_of, served_files
from tests.support.scored_models import EXACT, two_tower
from tests.support.servers import FREE


@pytest.mark.promise("Python, libraries and packages that an attacker adds to the repository are not run")
def test_unsigned_files_are_left_out_of_the_private_folder(target: Target) -> None:
    for folder in (target.newest, target.model, target.model / "1", target.repository):
        add_code(target, folder)
    (target.newest / "model.py").write_text(target.code)
    files = served_files(target)
    assert files.keys() == expected_files()
    assert b"from serving.backend import TritonPythonModel" in files["m/2/model.py"]


@pytest.mark.promise("Python, libraries and packages that an attacker adds to the repository are not run")
def test_a_server_runs_no_code_of_the_repository(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model, in the working directory and on PYTHONPATH; and where a model is reloaded."""
    for folder in (target.newest, target.model, target.repository):
        add_code(target, folder)
    (target.newest / "model.py").write_text(target.code)
    monkeypatch.chdir(target.repository)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target.repository), "", str(target.model)]))
    with run_server(
        Path(), FREE, models=["m"], trust=Trust(keys=target.trusted), log=target.repository.parent / "log"
    ) as server:
        assert answers(server.grpc, seed=2) == 2


@pytest.mark.promise("An older signed version is refused below `--min-version`")
def test_an_older_version_is_served_only_above_the_floor(target: Target) -> None:
    """Nothing can be told from a signature about what was published since."""
    shutil.rmtree(target.newest)
    assert served_files(target).keys() == expected_files(1)
    assert served_files(target, min_versions={"m": 1, "*": 1}).keys() == expected_files(1)
    for floors in ({"m": 2}, {"*": 2}, {"*": 1, "m": 3}):
        with pytest.raises(ServingError, match=r"m: expected version \d or newer, as --min-version says, got 1"):
            served_files(target, min_versions=floors)


@pytest.mark.promise("The bytes that are loaded are the bytes that were verified")
def test_the_copied_files_are_the_verified_ones(target: Target) -> None:
    """Whoever changes a file meanwhile gets it refused, or not served."""
    path = target.newest / "weights.0.bin"
    right, wrong = path.read_bytes(), bytes(path.stat().st_size)
    done = threading.Event()

    def rewrite() -> None:
        while not done.is_set():
            for content in (wrong, right):
                with suppress(OSError), path.open("r+b") as file:
                    file.write(content)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(30):
            with suppress(ServingError):
                assert served_files(target)["m/2/weights.0.bin"] == right
    finally:
        done.set()
        thread.join()
    assert served_files(target)["m/2/weights.0.bin"] == right
    path.write_bytes(wrong)
    with pytest.raises(ServingError, match="SHA-256"):
        served_files(target)


def test_paths_of_the_repository_are_removed_from_pythonpath(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 2.51's own Python passes over PYTHONPATH; another's may not."""
    linked, mine = target.repository.parent / "linked", target.repository.parent / "mine"
    linked.symlink_to(target.model)
    monkeypatch.chdir(target.repository)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target.repository), "", "m", str(linked), str(mine)]))
    with private_folder(Path(), ["m"], Trust(keys=target.trusted)) as private:
        assert private.environment["PYTHONPATH"] == str(mine)


def test_the_private_folder_holds_copies_and_no_links(target: Target) -> None:
    trust = Trust(keys=target.trusted, folder=target.repository.parent)
    with private_folder(target.repository, ["m"], trust) as private:
        inodes = {path.stat().st_ino for path in private.repository.rglob("*")}
        assert not inodes & {path.stat().st_ino for path in target.repository.rglob("*")}
        content = (private.repository / "m" / "2" / "weights.0.bin").read_bytes()
        (target.newest / "weights.0.bin").write_bytes(bytes(len(content)))
        assert (private.repository / "m" / "2" / "weights.0.bin").read_bytes() == content
        assert not any(path.is_symlink() for path in private.repository.rglob("*"))
    assert not Path(private.path).exists()


def test_a_signed_model_with_scores_has_all_its_programs(target: Target) -> None:
    path = export_model(two_tower(), target.repository, "ranker", EXACT, signing_key=target.key)
    manifest = open_bundle(path).manifest
    request = {"user_id": [[3]], "country": [[4]], "words": [[5, 6]], "item_id": [[7]]}
    expected = Engine.open(path).score(request)
    with private_folder(target.repository, ["ranker"], Trust(keys=target.trusted)) as private:
        version = private.repository / "ranker" / path.name
        assert {file.name for file in version.iterdir()} == {*manifest.files, "manifest.json", "manifest.sig"}
        scores = Engine.open(version).score(request)
        for name, values in expected.items():
            np.testing.assert_array_equal(scores[name], values)


def test_weights_in_place_are_verified_and_other_files_not_linked(target: Target) -> None:
    trust = Trust(keys=target.trusted, weights_in_place=True)
    with private_folder(target.repository, ["m"], trust) as private:
        linked = [path for path in private.repository.rglob("*") if path.is_symlink()]
        assert linked == [private.repository / "m" / "2" / "weights.0.bin"]
        assert linked[0].readlink() == target.newest / "weights.0.bin"
        engine = Engine.open(private.repository / "m" / "2")
        with in_use(target.newest) as used, in_use(target.model / "1") as unused:
            assert (used, unused) == (True, False)  # tbe-export prune leaves it
        np.testing.assert_array_equal(engine.lookup({"x": [[7]]})["x"], row_of(2))
    flip(target.newest / "weights.0.bin")
    with (
        pytest.raises(ServingError, match=r"weights\.0\.bin: expected SHA-256"),
        private_folder(target.repository, ["m"], trust),
    ):
        pass


def test_leftovers_of_a_killed_server_are_removed(target: Target, tmp_path: Path) -> None:
    """The next one that makes a private folder there does it."""
    folder = tmp_path / "private"
    folder.mkdir()
    code = (
        "import os; from pathlib import Path; from serving.server.private_folder import Trust, private_folder\n"
        f"trust = Trust(keys=Path({str(target.trusted)!r}), folder=Path({str(folder)!r}))\n"
        f"with private_folder(Path({str(target.repository)!r}), ['m'], trust): os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (leftover,) = folder.iterdir()
    with private_folder(target.repository, ["m"], Trust(keys=target.trusted, folder=folder)) as private:
        assert [str(path) for path in folder.iterdir()] == [private.path]
        assert not leftover.exists()
        # One that is in use stays.
        with private_folder(target.repository, ["m"], Trust(keys=target.trusted, folder=folder)):
            assert Path(private.path).exists()
    assert list(folder.iterdir()) == []


def test_a_private_folder_in_the_repository_is_refused(target: Target) -> None:
    with (
        pytest.raises(ServingError, match="expected a folder outside the repository"),
        private_folder(target.repository, ["m"], Trust(keys=target.trusted, folder=target.model)),
    ):
        pass
