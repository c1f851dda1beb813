"""The known Triton releases, and the tritonserver that is installed on this machine.

The official container has `tritonserver` on PATH. Elsewhere the tritonserver of the nvidia-pytriton wheel is used
(0.7 has Triton 24.10). It needs a folder of backends, put together from parts of the wheel, and this environment's
Python first on PATH, because its stub uses the first interpreter on PATH.
"""

import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from serving.errors import TritonserverFailed
from serving.files import temporary_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonRelease:
    """A Triton release.

    Attributes:
        container: the tag of the official container.
        version: the major and minor version of its tritonserver.
        is_secure: whether it has the security fixes for a server that other machines can reach.
        has_numpy_2: whether the stub of its Python backend was built for numpy 2, and so works with numpy 1 and 2.
    """

    container: str
    version: tuple[int, int]
    is_secure: bool
    has_numpy_2: bool


# Oldest first.
TRITON_RELEASES = (
    # The one in nvidia-pytriton 0.7.0. It lacks the 2025 fixes of the Python backend's shared memory, and others.
    TritonRelease(container="24.10", version=(2, 51), is_secure=False, has_numpy_2=False),
    TritonRelease(container="26.04", version=(2, 68), is_secure=True, has_numpy_2=True),
)


def triton_release(version: str) -> TritonRelease:
    """The entry for a server: the newest one that is not newer than the server, or else the oldest one.

    Args:
        version: the version that the server reports, such as "2.51.0".
    """
    major, minor = map(int, version.split(".")[:2])
    older = (release for release in TRITON_RELEASES if release.version <= (major, minor))
    return max(older, key=_version, default=TRITON_RELEASES[0])


def oldest_secure() -> TritonRelease:
    """The oldest Triton release for a server that other machines can reach."""
    return min((release for release in TRITON_RELEASES if release.is_secure), key=_version)


def _version(release: TritonRelease) -> tuple[int, int]:
    return release.version


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver on this machine.

    Attributes:
        program: the path of tritonserver.
        environment: the environment variables that it needs.
        backends: the folder of its backends, or None if it finds its own.
    """

    program: Path
    environment: dict[str, str]
    backends: Path | None


def find_tritonserver(stack: contextlib.ExitStack) -> Installation:
    """The tritonserver on PATH, or else that of nvidia-pytriton.

    Args:
        stack: removes the folder of backends when it is closed.

    Raises:
        TritonserverFailed: neither exists, or a part of the installation is missing.
    """
    if program := shutil.which("tritonserver"):
        return Installation(Path(program), {}, None)
    spec = find_spec("pytriton")  # found, not imported: importing it changes the process
    if spec is None or spec.origin is None:
        raise TritonserverFailed(
            "tritonserver: expected one on PATH or in the nvidia-pytriton wheel, found neither: run in Triton's "
            "official container, or `pip install 'tbe-serving[server]'`"
        )
    package = Path(spec.origin).parent
    backends = stack.enter_context(temporary_folder(Path(tempfile.gettempdir()), "tbe-serve-backends-"))
    return _bundled(package, backends)


def _bundled(package: Path, backends: Path) -> Installation:
    triton = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = triton / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        folders = sorted(stub.parents[1].iterdir(), key=lambda folder: (len(folder.name), folder.name))
        supported = ", ".join(folder.name for folder in folders)
        raise TritonserverFailed(
            f"{stub}: expected a Python backend for Python {python}, found none: nvidia-pytriton has them for Python "
            f"{supported}"
        )
    backend = backends / "python"
    shutil.copytree(triton / "backends" / "python", backend)
    Path(shutil.copy(stub, backend)).chmod(0o700)  # serving/server/process_setup.py skips Triton's own attempt
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
