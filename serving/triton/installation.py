"""Find a real tritonserver.

The official container has `tritonserver` on PATH. Elsewhere the one in the nvidia-pytriton wheel is taken (0.7 has
24.10). That needs a folder of backends, put together from the parts of the wheel. It also needs this environment's
Python first on PATH: its stub takes the interpreter that it finds there.
"""

import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from serving.errors import TritonserverFailed


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver on this machine.

    Attributes:
        program: its path.
        environment: variables that it needs.
        backends: the folder of its backends; None where it finds its own.
    """

    program: Path
    environment: dict[str, str]
    backends: Path | None


def find_tritonserver(stack: contextlib.ExitStack) -> Installation:
    """The tritonserver on PATH, or else the one of nvidia-pytriton.

    Args:
        stack: removes the folder of backends at its end.

    Raises:
        TritonserverFailed: there is neither, or what it needs is missing.
    """
    if program := shutil.which("tritonserver"):
        return Installation(Path(program), {}, None)
    spec = find_spec("pytriton")  # found, not imported: importing it changes the process
    if spec is None or spec.origin is None:
        raise TritonserverFailed(
            "tritonserver: expected one on PATH or in the nvidia-pytriton wheel, found neither: run in Triton's "
            "official container, or `pip install nvidia-pytriton==0.7.0`"
        )
    package = Path(spec.origin).parent
    backends = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tbe-serve-")))
    return _bundled(package, backends)


def _bundled(package: Path, backends: Path) -> Installation:
    if int(version("numpy").partition(".")[0]) >= 2:
        raise TritonserverFailed(
            f"numpy: expected < 2 beside the tritonserver of nvidia-pytriton, found {version('numpy')}: its "
            "Python backend would hand out empty tensors: `pip install 'numpy<2'`"
        )
    triton = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = triton / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise TritonserverFailed(f"{stub}: not found: nvidia-pytriton has no Python backend for Python {python}")
    backend = backends / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    shutil.copy(stub, backend)
    libraries = [package.parent / "nvidia_pytriton.libs", _libpython_folder(python)]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return Installation(
        program=triton / "bin" / "tritonserver",
        environment={
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join([*map(str, libraries), *([inherited] if inherited else [])]),
        },
        backends=backends,
    )


def _libpython_folder(python: str) -> Path:
    name = f"libpython{python}.so.1.0"
    folders = [Path(folder) for key in ("LIBDIR", "LIBPL") if (folder := sysconfig.get_config_var(key))]
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        folders += [Path("/usr/lib") / multiarch, Path("/usr/local/lib")]
    for folder in folders:
        if (folder / name).exists():
            return folder
    raise TritonserverFailed(
        f"{name}: expected in {' or '.join(map(str, folders))}, found in none: Triton's Python backend needs it "
        f"(Debian: `apt install libpython{python}`)"
    )
