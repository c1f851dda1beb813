"""What is built of the sources, and what an environment of it can do: pip, its index and what it installs are real."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import export_model
from serving.engine import Engine
from serving.server import Ports, run_server
from tests.support.scored_models import EXACT, dlrm, own_scores, random_request

ROOT = Path(__file__).parents[2]
PACKAGES = ("export", "model_repository", "serving")
# Beside Python files.
OTHERS = {
    *("export/py.typed", "export/compare/page.html", "export/compare/dtypes.html"),
    *("export/kubernetes/alerts.yaml", "export/kubernetes/model.yaml.jinja"),
    *("serving/py.typed", "serving/protocol/descriptors.binpb", "serving/protocol/LICENSE"),
    "model_repository/lookup/config.pbtxt",
}
MODEL = """
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

def model():
    table = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["x"])
    return EmbeddingBagCollection(tables=[table])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("built")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    backend = "import sys; from setuptools import build_meta as made; print(getattr(made, sys.argv[1])(sys.argv[2]))"
    out = str(folder)
    done = run([sys.executable, "-c", backend, "build_sdist", out], folder / "source")
    sdist = folder / done.stdout.splitlines()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked")  # ours
    (unpacked,) = (folder / "unpacked").iterdir()
    done = run([sys.executable, "-c", backend, "build_wheel", out], unpacked)
    return sdist, folder / done.stdout.splitlines()[-1]


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = tried(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def tried(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command that knows nothing of the sources, nor of this environment."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    path = f"{Path(command[0]).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )


def test_sdist_and_wheel_have_exactly_the_needed_files(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    expected = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")} | OTHERS
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert packed >= expected | {"pyproject.toml", "README.md", "LICENSE"}
    assert {name for name in packed - expected if name.startswith(PACKAGES)} == set()


def interpreters(*versions: str) -> list[Any]:
    """Of these versions of Python those that this machine has, as parameters: on PATH, or where pyenv keeps them."""
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    parameters = []
    for version in versions:
        candidates = [*folder.glob(f"{version}.*/bin/python{version}"), shutil.which(f"python{version}")]
        runs = (
            str(candidate)
            for candidate in candidates
            if candidate is not None
            and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0
        )
        parameters += [pytest.param(path, id=version) for path in [next(runs, None)] if path is not None]
    return parameters


LOOK_UP = """
import sys
import numpy as np
from serving.client import LookupClient

with LookupClient(sys.argv[1], "m", 20) as client:
    row, empty = client.lookup({"x": [[1, 2], []]})["x"]
    assert row.shape == (8,) and row.any() and not empty.any(), (row, empty)
print(sys.version_info[:2], np.__version__)
"""


@pytest.mark.long
@pytest.mark.parametrize("python", interpreters("3.11", "3.12", "3.13"))
def test_the_client_looks_up_on_every_python(
    built: tuple[Path, Path], one_model: Path, tmp_path: Path, python: str
) -> None:
    run([python, "-m", "venv", str(tmp_path / "env")], tmp_path)
    bin_ = tmp_path / "env" / "bin"
    uv = str(Path(sys.executable).with_name("uv"))
    run([uv, "pip", "install", "--python", str(bin_ / "python"), str(built[1])], tmp_path)
    with run_server(one_model, Ports(grpc=0, http=0, operations=0)) as server:
        done = run([str(bin_ / "python"), "-W", "error", "-c", LOOK_UP, server.grpc], tmp_path)
        (tmp_path / "asked.jsonl").write_text('{"x": [[1, 2], []]}')
        typed = run([str(bin_ / "tbe-serve"), "lookup", "m", "asked.jsonl", "--url", server.grpc], tmp_path)
        assert [len(row) for row in json.loads(typed.stdout)["x"]] == [8, 8]
    version, numpy = done.stdout.rsplit(maxsplit=1)
    assert version == str(tuple(map(int, Path(python).name.removeprefix("python").split("."))))
    assert numpy >= "2"


@pytest.mark.long
def test_the_readme_s_uv_leaves_the_cuda_build_out(built: tuple[Path, Path], tmp_path: Path) -> None:
    (line,) = re.findall(r"^uv (pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    line = line.replace("'tbe-serving[", f"'{built[1]}[").replace("pip install", "pip install --dry-run", 1)
    venv.create(tmp_path / "env")
    uv = f"{Path(sys.executable).with_name('uv')} {line} --python {tmp_path / 'env/bin/python'}"
    done = run([shutil.which("bash") or "bash", "-c", uv], tmp_path)
    installed = dict(re.findall(r"^ \+ ([\w-]+)==(\S+)", done.stderr, re.MULTILINE))
    assert installed["fbgemm-gpu-cpu"].startswith("1.8.")
    assert installed["torchrec"].startswith("1.8.")
    assert "fbgemm-gpu" not in installed


SCORE = """
import json, sys
import numpy as np
from serving.engine import Engine

bags, dense = json.loads(sys.argv[1])
with Engine.open(sys.argv[2]) as engine:
    rows = engine.lookup(bags)
    scores = engine.score(bags, {name: np.array(numbers, np.float32) for name, numbers in dense.items()})
print(json.dumps([{name: array.tolist() for name, array in answer.items()} for answer in (rows, scores)]))
"""


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_an_engine_environment_scores_without_torchrec(built: tuple[Path, Path], tmp_path: Path) -> None:
    model = dlrm().eval()
    bundle = export_model(model, tmp_path / "r", "m", EXACT)
    bags, dense = random_request(model, np.random.default_rng(0), 5)
    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    run([str(bin_ / "pip"), "install", f"{built[1]}[engine]"], tmp_path)
    request = json.dumps([bags, {name: numbers.tolist() for name, numbers in dense.items()}])
    done = run([str(bin_ / "python"), "-W", "error", "-c", SCORE, request, str(bundle)], tmp_path)
    rows, scores = json.loads(done.stdout)
    for name, numbers in Engine.open(bundle).lookup(bags).items():
        np.testing.assert_allclose(rows[name], numbers, rtol=0, atol=1e-6)
    np.testing.assert_allclose(scores["scores"], own_scores(model, bags, dense)["scores"], rtol=0, atol=1e-6)
    assert tried([str(bin_ / "python"), "-c", "import torchrec"], tmp_path).returncode == 1
    export = tried(
        [str(bin_ / "tbe-export"), "model", "--model", "m:model", "--repository", "r", "--name", "m"], tmp_path
    )
    assert "`pip install 'tbe-serving[export]'`" in export.stderr


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_wheel_environment_names_missing_packages_then_serves(
    built: tuple[Path, Path], one_model: Path, tmp_path: Path
) -> None:
    _, wheel = built
    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    (tmp_path / "m.py").write_text(MODEL)
    export = [str(bin_ / "tbe-export"), "model", "--model", "m:model", "--repository", "r", "--name", "m"]
    run([str(bin_ / "pip"), "install", str(wheel)], tmp_path)
    # The first command of each program says the extra.
    run_on = [str(bin_ / "tbe-serve"), "run", "--grpc-port", "0", "--operations-port", "0", "--json"]
    for command, extra in ((export, "export"), ([*run_on, str(one_model)], "server")):
        assert f"`pip install 'tbe-serving[{extra}]'`" in tried(command, tmp_path).stderr
    run([str(bin_ / "pip"), "install", f"{wheel}[server,export]"], tmp_path)
    # torchrec brings FBGEMM's CUDA build. The command that mends this is in the message.
    refused = tried(export, tmp_path)
    assert refused.returncode == 1
    (mending,) = re.findall(r"mend this environment with `([^`]+)`", refused.stderr)
    run([shutil.which("bash") or "bash", "-c", f'PATH="{bin_}:$PATH"; {mending}'], tmp_path)
    run(export, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with subprocess.Popen([*run_on, "r"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["grpc"]
            lookup_command = [str(bin_ / "tbe-serve"), "lookup", "m", "--url", address]
            done = subprocess.run(
                lookup_command, input='{"x": [[1, 2], []]}', capture_output=True, text=True, check=True, cwd=tmp_path
            )
            (row, empty) = json.loads(done.stdout)["x"]
            assert len(row) == 8
            assert any(row)
            assert empty == [0.0] * 8
        finally:
            server.terminate()
            server.wait()
    # A folder of the user's own that hides ours is named, before anything starts.
    (tmp_path / "own" / "serving").mkdir(parents=True)
    (tmp_path / "own" / "serving" / "__init__.py").touch()
    hidden = tried([*run_on, str(tmp_path / "r")], tmp_path / "own")
    assert hidden.returncode == 1
    assert re.fullmatch(rf"tbe-serve: {tmp_path}/own/serving/__init__.py: hides the package .*\n", hidden.stderr)
