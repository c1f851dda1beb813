"""What each extra installs is enough for what it is for, and what it lacks is said with the extra that has it.

Packages that an extra does not install are hidden from processes of this environment. `test_wheel.py` installs some.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from export import export_model
from serving.engine import Engine
from tests.support.scored_models import EXACT, own_scores, random_request, two_tower

ROOT = Path(__file__).parents[2]
# Where an environment has PyTorch's CPU build, FBGEMM's is beside it.
INSTEAD = {"fbgemm-gpu": "fbgemm-gpu-cpu"}
# Runs Python as if nothing but some packages were installed.
WITH = """
import importlib.metadata, json, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

installed = set(json.loads(sys.argv.pop(1)))
owners = {
    module: {name.lower().replace("_", "-") for name in names} for module, names in packages_distributions().items()
}
version = importlib.metadata.version

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_absent = path is None and name in owners and not owners[name] & installed
        return None if is_absent else super().find_spec(name, path, target)

def version_of(name):
    if name.lower().replace("_", "-") not in installed:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
importlib.metadata.version = version_of
exec(sys.argv.pop(1))
"""
LOOK_UP = """
import json, sys
import numpy as np
from serving.engine import Engine

bags, dense = json.loads(sys.argv[1])
with Engine.open(sys.argv[2]) as engine:
    rows = engine.lookup(bags)
    scores = engine.score(bags, {name: np.array(numbers, np.float32) for name, numbers in dense.items()})
print(json.dumps([{name: array.tolist() for name, array in answer.items()} for answer in (rows, scores)]))
"""
COMMAND = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def installed_by(extra: str) -> set[str]:
    """The packages that pip installs for `tbe-serving[extra]`, as far as this environment has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def closure(requirements: Iterable[str]) -> Iterator[Requirement]:
        for requirement in map(Requirement, requirements):
            if requirement.name == project["name"]:
                yield from closure(line for name in requirement.extras for line in extras[name])
            else:
                yield requirement

    packages = {project["name"]}
    open_ = [*closure([*project["dependencies"], *(extras[extra] if extra else ())])]
    while open_:
        requirement = open_.pop()
        name = INSTEAD.get(requirement.name, str(canonicalize_name(requirement.name)))
        if name in packages:
            continue
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # such as what CUDA needs
            continue
        packages.add(name)
        for required in map(Requirement, lines):
            extras_of = requirement.extras or {""}
            if required.marker is None or any(
                required.marker.evaluate({"extra": extra_name}) for extra_name in extras_of
            ):
                open_.append(required)
    return packages


def run(extra: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITH, json.dumps(sorted(installed_by(extra))), code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_extras_differ_in_what_they_install() -> None:
    client, engine, server, export = map(installed_by, ("client", "engine", "server", "export"))
    assert client < engine < server
    assert client < export
    assert not client & {"torch", "fbgemm-gpu-cpu", "torchrec", "nvidia-pytriton", "tritonclient"}
    assert engine >= {"torch", "fbgemm-gpu-cpu"}
    assert not engine & {"torchrec", "nvidia-pytriton", "tritonclient", "h11"}
    assert "nvidia-pytriton" in server - export


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(two_tower(), tmp_path_factory.mktemp("extras"), "m", EXACT)


def test_an_engine_looks_up_and_scores_in_a_process(bundle: Path) -> None:
    module = two_tower()
    bags, dense = random_request(module, np.random.default_rng(0), 5)
    request = json.dumps([bags, {name: array.tolist() for name, array in dense.items()}])
    done = run("engine", LOOK_UP, request, str(bundle))
    assert done.returncode == 0, done.stderr
    rows, scores = json.loads(done.stdout)
    with Engine.open(bundle) as engine:
        for name, array in engine.lookup(bags).items():
            np.testing.assert_array_equal(np.array(rows[name], np.float32), array)
    for name, array in own_scores(module, bags, dense).items():
        np.testing.assert_allclose(scores[name], array, atol=1e-6)


SCORES = ("serving", "score-files", "day.parquet", "--bundle", "b", "--out", "scores")
EXPORTS = ("export", "model", "--model", "m:model", "--repository", "r", "--name", "m")


@pytest.mark.parametrize(
    ("extra", "code", "arguments", "lacking", "needed"),
    [
        pytest.param("client", "import serving.engine", (), "torch", "engine", id="engine, by a client"),
        pytest.param("client", "from export import export_model", (), "torch", "export", id="export, by a client"),
        pytest.param(
            "engine", "from export import export_model", (), "torchrec", "export", id="export, by an engine"
        ),
        pytest.param(
            "server",
            "from export import export_model",
            (),
            "torchrec",
            "export",
            id="export, by a server",
            marks=pytest.mark.long,
        ),
        pytest.param("engine", COMMAND, SCORES, "pyarrow", "batch", id="score-files, by an engine"),
        pytest.param("engine", COMMAND, EXPORTS, "torchrec", "export", id="tbe-export, by an engine"),
        pytest.param(
            "engine", COMMAND, ("serving", "run", "BUNDLE"), "tritonserver", "server", id="run, by an engine"
        ),
        pytest.param(
            "export",
            COMMAND,
            ("serving", "run", "BUNDLE"),
            "tritonserver",
            "server",
            id="run, by an export",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    bundle: Path, extra: str, code: str, arguments: tuple[str, ...], lacking: str, needed: str
) -> None:
    repository = str(bundle.parent.parent)
    done = run(extra, code, *(argument.replace("BUNDLE", repository) for argument in arguments))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"(^|: ){lacking}: expected .* found n.*`pip install 'tbe-serving\[{needed}\]'`", last), last
