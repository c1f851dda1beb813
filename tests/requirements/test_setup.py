"""What set-up installs: locks with hashes, and the torch that pip can have. pip is real; its index is a folder."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from serving.pins import DEFAULT_STACK, STACKS, Stack
from tests.support.long_cases import one_in

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.txt"))
PIP = str(Path(sys.executable).with_name("pip"))


def pins(lock: Path) -> dict[str, str]:
    """{package: version} of a lock."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_pin_has_hashes(lock: Path) -> None:
    text = re.sub(r"^#.*", "", lock.read_text(), flags=re.MULTILINE)
    hashed = re.findall(r"^[a-z0-9-]+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", text, re.MULTILINE)
    assert len(pins(lock)) == len(hashed) == text.count("==") > 0


def test_both_torch_locks_have_the_requested_release_and_no_double_pins() -> None:
    cpu, pypi = pins(REQUIREMENTS / "torch-cpu.txt"), pins(REQUIREMENTS / "torch-pypi.txt")
    assert cpu["torch"] == pypi["torch"] + "+cpu"
    for asking in ("serve.in", "torch-pypi.in"):
        assert f"torch=={pypi['torch']}\n" in (REQUIREMENTS / asking).read_text()
    for purpose in PURPOSES:
        assert not pins(REQUIREMENTS / f"{purpose}.txt").keys() & (cpu.keys() | pypi.keys())


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: f"torch {stack.torch}")
def test_the_locks_match_the_stacks_in_pins_py(stack: Stack) -> None:
    """serving/pins.py is the table. The default's lock is spread over the purposes; each other stack has one."""
    minor = stack.torch.rpartition(".")[0]
    if stack is DEFAULT_STACK:
        locked = (
            pins(REQUIREMENTS / "serve.txt")
            | pins(REQUIREMENTS / "export.txt")
            | pins(REQUIREMENTS / "torch-pypi.txt")
        )
    else:
        locked = pins(REQUIREMENTS / f"stack-{minor}.txt")
        text = (REQUIREMENTS / f"stack-{minor}.in").read_text()
        assert re.findall(r"^([\w-]+)==", text, re.MULTILINE) == ["torch", "torchrec", "fbgemm-gpu-cpu"]
    assert (locked["torch"], locked["torchrec"], locked["fbgemm-gpu-cpu"]) == (
        stack.torch,
        stack.torchrec,
        stack.fbgemm,
    )


def test_every_lock_of_a_stack_is_in_the_pins() -> None:
    locks = {path.stem.removeprefix("stack-") for path in REQUIREMENTS.glob("stack-*.txt")}
    assert locks == {stack.torch.rpartition(".")[0] for stack in STACKS if stack is not DEFAULT_STACK}


def test_a_stack_replaces_packages_of_the_default_alone() -> None:
    """Another version of any other package would let the two stacks differ in more than they say."""
    replaced = {"torch", "torchrec", "fbgemm-gpu-cpu"}
    kept_names = {name for purpose in PURPOSES for name in pins(REQUIREMENTS / f"{purpose}.txt")} - replaced
    for lock in REQUIREMENTS.glob("stack-*.txt"):
        assert not kept_names & pins(lock).keys()


# What an environment for each purpose has: each lock holds what those before it do not.
PURPOSES = ("serve", "triton", "export", "demo", "dev")


def test_no_lock_repeats_a_pin_of_the_same_environment() -> None:
    names = [name for purpose in (*PURPOSES, "uv") for name in pins(REQUIREMENTS / f"{purpose}.txt")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("purpose", PURPOSES)
def test_each_lock_has_what_is_asked_for(purpose: str) -> None:
    locked = {
        name: version for earlier in PURPOSES[: PURPOSES.index(purpose) + 1] for name, version in in_lock(earlier)
    }
    requirements = re.findall(
        r"^([\w-]+)(?:\[\w+\])?(?:==(\S+))?", (REQUIREMENTS / f"{purpose}.in").read_text(), re.MULTILINE
    )
    for name, version in requirements:
        if name != "torch":  # it has locks of its own
            assert locked[name.lower()] == (version or locked[name.lower()])


def in_lock(purpose: str) -> Iterable[tuple[str, str]]:
    return pins(REQUIREMENTS / f"{purpose}.txt").items()


def test_each_extra_lists_the_requirements_of_its_purposes() -> None:
    project = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, purposes in {
        "engine": ["serve"],
        "batch": ["serve", "dev"],
        "export": ["serve", "export"],  # export.txt is beside serve.txt
        "server": ["serve", "triton"],
        "demo": ["demo"],
        "dev": ["dev"],
    }.items():
        requirements = "".join((REQUIREMENTS / f"{purpose}.in").read_text() for purpose in purposes)
        for requirement in extras[extra]:
            name = re.split(r"[^\w-]", requirement)[0]
            # pip cannot leave FBGEMM's CUDA build out; the locks do.
            is_declared = name in ("tbe-serving", "torch", "fbgemm-gpu") or re.search(
                rf"^{name}\b", requirements, re.MULTILINE
            )
            assert is_declared, f"{extra}: {name}"


# Imports modules as if what the locks named first have were not installed.
IMPORTS = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

absent, modules = (set(words.split()) for words in sys.argv[1:])
distributions = packages_distributions()

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        owners = {owner.lower().replace("_", "-") for owner in distributions.get(name, ())}
        return None if owners and owners <= absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
for module in modules:
    __import__(module)
"""


@pytest.mark.parametrize(
    ("purpose", "modules"),
    one_in(
        3,
        [
            ("serve", "serving.__main__ serving.engine serving.client serving.server"),
            ("export", "export.__main__ export.pipeline export.compare.page export.plan.picture"),
            ("demo", "examples.movielens.demo examples.hosts.demo"),
        ],
    ),
)
def test_the_imports_of_a_purpose_are_in_its_locks(purpose: str, modules: str) -> None:
    later = PURPOSES[PURPOSES.index(purpose) + 1 :]
    refused = " ".join(name for later_purpose in later for name in pins(REQUIREMENTS / f"{later_purpose}.txt"))
    command = [sys.executable, "-c", IMPORTS, refused, modules]
    done = subprocess.run(command, cwd=REQUIREMENTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def wheel(folder: Path, name: str, version: str) -> str:
    """Make one that says so and holds nothing; its SHA-256."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


def run(index: Path, lock: str, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script of ours beside a lock `torch-cpu.txt`, with a pip that knows nothing but `index`."""
    folder = index.parent / "requirements"
    folder.mkdir()
    for name in (script, "uv.sh"):
        shutil.copy(REQUIREMENTS / name, folder)
    (folder / "torch-cpu.txt").write_text(lock)
    only = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    command = [str(folder / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | only | more)


def test_the_cpu_build_is_preferred(index: Path) -> None:
    wheel(index, "torch", "2.13.0")
    digest = wheel(index, "torch", "2.13.0+cpu")
    done = run(index, f"torch==2.13.0+cpu --hash=sha256:{digest}\n", "torch.sh", PIP)
    assert (done.returncode, done.stdout) == (0, "torch-cpu.txt\n"), done.stderr
    assert (
        "setup: taking torch==2.13.0+cpu, PyTorch's CPU build: an index or a folder that pip knows has it"
        in done.stderr
    )


@pytest.mark.parametrize("constrained", [False, True])
def test_torch_of_pypi_is_the_fallback(index: Path, constrained: bool) -> None:
    """pip says something else where it has constraints."""
    wheel(index, "torch", "2.13.0")
    constraints = index.parent / "constraints.txt"
    constraints.write_text("torch<=2.14\n" if constrained else "")
    lock = f"torch==2.13.0+cpu --hash=sha256:{'0' * 64}\n"
    done = run(index, lock, "torch.sh", PIP, PIP_CONSTRAINT=str(constraints))
    assert (done.returncode, done.stdout) == (0, "torch-pypi.txt\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "setup: taking PyPI's torch and the CUDA packages that it requires (4.8 GB on disk): nothing "
    )
    assert "PIP_EXTRA_INDEX_URL" in line


def test_a_torch_that_is_not_the_pinned_one_is_not_taken(index: Path) -> None:
    wheel(index, "torch", "2.13.0+cpu")
    done = run(index, f"torch==2.13.0+cpu --hash=sha256:{'0' * 64}\n", "torch.sh", PIP)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Expected sha256 " + "0" * 64 in done.stderr


@pytest.mark.parametrize("pinned", [True, False])
def test_a_file_that_is_not_the_pinned_one_is_not_installed(index: Path, pinned: bool) -> None:
    digest = wheel(index, "nothing", "1.0")
    environment = index.parent / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "pip").symlink_to(PIP)
    lock = f"nothing==1.0 --hash=sha256:{digest if pinned else '0' * 64}\n"
    done = run(index, lock, "install.sh", str(environment), "torch-cpu.txt", PIP_TARGET=str(environment / "packages"))
    assert (done.returncode == 0) is pinned
    assert done.stdout.startswith("setup: installing 1 pinned packages\n")
    assert (environment / "packages" / "nothing-1.0.dist-info").exists() is pinned
    assert pinned or "Expected sha256 " + "0" * 64 in done.stderr


@pytest.fixture
def with_uv(index: Path) -> None:
    """uv lies where install.sh and torch.sh look for it."""
    (index.parent / ".venv" / "bin").mkdir(parents=True)
    (index.parent / ".venv" / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))


@pytest.mark.usefixtures("with_uv")
def test_uv_finds_the_cpu_build_where_pip_would(index: Path) -> None:
    digest = wheel(index, "torch", "2.13.0+cpu")
    done = run(index, f"torch==2.13.0+cpu --hash=sha256:{digest}\n", "torch.sh", PIP)
    assert (done.returncode, done.stdout) == (0, "torch-cpu.txt\n"), done.stderr


@pytest.mark.usefixtures("with_uv")
@pytest.mark.parametrize("pinned", [True, False])
def test_uv_installs_what_is_pinned_and_nothing_else(index: Path, pinned: bool) -> None:
    environment = index.parent / "environment"
    venv.create(environment, symlinks=True)
    shutil.copy(PIP, environment / "bin" / "pip")
    digest = wheel(index, "nothing", "1.0")
    lock = f"nothing==1.0 --hash=sha256:{digest if pinned else '0' * 64}\n"
    done = run(index, lock, "install.sh", str(environment), "torch-cpu.txt", UV_CACHE_DIR=str(index.parent / "cache"))
    assert (done.returncode == 0) is pinned, done.stderr
    assert any(environment.rglob("nothing-1.0.dist-info")) is pinned
    assert ("setup: uv could not" in done.stderr) is not pinned


def test_uv_gets_the_settings_of_pip(index: Path) -> None:
    """Of pip's levels the most particular one counts: the environment, then pip's own section, then all sections'."""
    uv = index.parent / ".venv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text('#!/bin/sh\necho "$@"\necho "cert: $SSL_CERT_FILE"\n')
    uv.chmod(0o755)
    config = index.parent / "pip.conf"
    config.write_text(
        "[global]\nindex-url = file:///global\nextra-index-url = file:///one\n  file:///two\ncert = /a.pem\n"
        "[install]\nindex-url = file:///install\n"
    )
    settings = {"PIP_CONFIG_FILE": str(config), "PIP_NO_INDEX": "0", "PIP_EXTRA_INDEX_URL": "", "PIP_CERT": "/b.pem"}
    done = run(index, "", "uv.sh", PIP, "--dry-run", **settings)
    options, cert = done.stdout.splitlines()
    assert "--default-index file:///install --index file:///one --index file:///two" in options
    assert f"--find-links {index}" in options
    assert "--no-index" not in options
    assert cert == "cert: /b.pem"
