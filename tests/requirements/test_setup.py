"""What set-up installs: locks with hashes, and the torch that pip can have. pip is real; its index is a folder."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def test_both_torches_are_the_one_that_is_asked_for_and_nothing_is_pinned_twice() -> None:
    cpu, pypi = pins(REQUIREMENTS / "torch-cpu.txt"), pins(REQUIREMENTS / "torch-pypi.txt")
    assert cpu["torch"] == pypi["torch"] + "+cpu"
    assert f"torch=={pypi['torch']}\n" in (REQUIREMENTS / "cpu.in").read_text()
    for lock in ("cpu.txt", "serve.txt"):
        assert not pins(REQUIREMENTS / lock).keys() & (cpu.keys() | pypi.keys())


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
    shutil.copy(REQUIREMENTS / script, folder)
    (folder / "torch-cpu.txt").write_text(lock)
    only = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    command = [str(folder / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | only | more)


def test_the_cpu_build_is_taken_where_there_is_one(index: Path) -> None:
    wheel(index, "torch", "2.13.0")
    digest = wheel(index, "torch", "2.13.0+cpu")
    done = run(index, f"torch==2.13.0+cpu --hash=sha256:{digest}\n", "torch.sh", PIP)
    assert (done.returncode, done.stdout) == (0, "torch-cpu.txt\n"), done.stderr
    assert (
        "setup: taking torch==2.13.0+cpu, PyTorch's CPU build: an index or a folder that pip knows has it"
        in done.stderr
    )


def test_pypi_s_torch_is_taken_where_there_is_none(index: Path) -> None:
    wheel(index, "torch", "2.13.0")
    done = run(index, f"torch==2.13.0+cpu --hash=sha256:{'0' * 64}\n", "torch.sh", PIP)
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
