"""What somebody does who can write into a repository, but has no trusted key."""

import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export import ExportConfig, WeightDtype, export_model
from serving.client import LookupClient
from serving.model.config_file import Pins
from serving.server import find_models
from serving.server.private_folder import Trust, private_folder
from tests.support.models import SUM, collection, float_tables

EXACT = ExportConfig(dtype={"*": WeightDtype.FP32})

VERSION_FILES = {"manifest.json", "manifest.sig", "model.py", "program.pt", "weights.0.bin"}


@dataclass(frozen=True)
class Target:
    """A repository that somebody may write to: `m` in versions 1 and 2, and `other` in version 1, all signed.

    Attributes:
        mark: a file that is there once code of the attacker ran.
    """

    repository: Path
    trusted: Path
    key: Path
    mark: Path

    @property
    def model(self) -> Path:
        return self.repository / "m"

    @property
    def newest(self) -> Path:
        return self.model / "2"

    @property
    def code(self) -> str:
        return f"open({str(self.mark)!r}, 'a').write(__file__ + chr(10))\n"


def row_of(seed: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """What the version made of this seed answers for the id 7 of `x`."""
    return float_tables(collection(SUM, seed=seed))["a"][[7]]


def answers(url: str, seed: int) -> int:
    """The version that answers, with the numbers of the collection of this seed."""
    with LookupClient(url, "m", 60) as client:
        answer = client.lookup({"x": [[7]]})
    np.testing.assert_array_equal(answer["x"], row_of(seed))
    return answer.version


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def add(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def served_files(target: Target, pins: Pins | None = None, **options: object) -> dict[str, bytes]:
    """What Triton would be given: paths and contents."""
    trust = Trust(keys=target.trusted, folder=target.repository.parent, **options)  # type: ignore[arg-type]
    with private_folder(target.repository, find_models(target.repository), trust, pins) as private:
        assert stat.S_IMODE(Path(private.path).stat().st_mode) == 0o700
        return {
            str(path.relative_to(private.repository)): path.read_bytes()
            for path in private.repository.rglob("*")
            if not path.is_dir()
        }


def expected_files(version: int = 2) -> set[str]:
    return {
        "m/config.pbtxt", *(f"m/{version}/{name}" for name in VERSION_FILES),
        "other/config.pbtxt", *(f"other/1/{name}" for name in VERSION_FILES),
    }  # fmt: skip


Attack = Callable[[Target], object]


def to_config(text: str) -> Attack:
    return lambda target: add(target.model / "config.pbtxt", text)


def unsigned_version(target: Target) -> None:
    bundle = export_model(collection(SUM, seed=9), target.repository, "m", EXACT)
    (bundle / "model.py").write_text(target.code)


def warm_up(target: Target) -> None:
    (target.model / "warm_up.jsonl").write_text('{"at": "", "why": "", "values": [7], "lengths": [1, 0, 0]}\n')


CHANGED_CONFIG = r"config\.sig: expected a signature by a key of .* over config\.pbtxt of model 'm', got another"

MODULES = ("json", "serving", "numpy", "torch", "triton_python_backend_utils", "sitecustomize", "usercustomize", "1")


def add_code(target: Target, folder: Path) -> None:
    """In every form in which Python or Triton might take it."""
    for name in MODULES:
        if not (folder / name).exists():
            (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(target.code)
        (folder / f"{name}.py").write_text(target.code)
        (folder / f"{name}.so").write_bytes(b"\x7fELF")
    cache = folder / "__pycache__"
    cache.mkdir(exist_ok=True)
    source = folder / "theirs.py"
    source.write_text(target.code)
    code = f"import py_compile; py_compile.compile({str(source)!r}, {str(cache / 'model.cpython-311.pyc')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    shutil.copy(cache / "model.cpython-311.pyc", folder / "model.pyc")
    for name in ("triton_python_backend_stub", "python3"):
        (folder / name).write_text(f"#!/bin/sh\necho stub >> '{target.mark}'\n")
        (folder / name).chmod(0o755)
    for name in ("libtriton_python.so", "libtorch.so", "theirs.pth"):
        (folder / name).write_bytes(b"\x7fELF")
