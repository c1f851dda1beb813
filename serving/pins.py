"""Which versions of packages work together. This is checked before torch or FBGEMM is used."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from serving.errors import EnvironmentMismatch

# What to do about an EnvironmentMismatch.
INSTALL = (
    "install it with `pip install 'tbe-serving[export]'`; without CUDA with the pins of the source of tbe-serving, "
    "`pip install --no-deps -r requirements/serve.txt -r requirements/export.txt -r requirements/torch-cpu.txt`"
)

# Minor versions that were built for one another (FBGEMM's release table), and that our tests run with.
_TORCH = "2.13"
_FBGEMM = "1.8"
_TORCHREC = "1.8"
_PYTRITON = "0.7"


def check_pins() -> None:
    """Compare the installed torch, fbgemm-gpu and torchrec with the versions that work together.

    torchrec may be missing: serving does not need it.

    Raises:
        EnvironmentMismatch: a package is missing or has another minor version, or both builds of FBGEMM are
            installed.
    """
    found = installed()
    _expect("torch", found.get("torch"), _TORCH)
    if "fbgemm-gpu-cpu" in found and "fbgemm-gpu" in found:
        raise EnvironmentMismatch(
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files: "
            f"uninstall both, then {INSTALL}"
        )
    name = "fbgemm-gpu" if "fbgemm-gpu" in found else "fbgemm-gpu-cpu"
    _expect(name, found.get(name), _FBGEMM)
    if "torchrec" in found:
        _expect("torchrec", found["torchrec"], _TORCHREC)


def installed() -> dict[str, str]:
    """The version of each installed package that a bundle depends on, by name."""
    versions = {}
    for name in ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "tbe-serving"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def tested_versions() -> list[str]:
    """Lines with the installed and the tested version of each package; this package comes first."""
    found = installed()
    tested = {"torch": _TORCH, "torchrec": _TORCHREC, "fbgemm-gpu-cpu": _FBGEMM, "nvidia-pytriton": _PYTRITON}
    if "fbgemm-gpu" in found:
        tested["fbgemm-gpu"] = tested.pop("fbgemm-gpu-cpu")
    with suppress(PackageNotFoundError):
        found["nvidia-pytriton"] = version("nvidia-pytriton")
    lines = [f"{name} {found.get(name, 'not installed')} (tested with {minor})" for name, minor in tested.items()]
    return [f"tbe-serving {found.get('tbe-serving', 'not installed')}", *lines]


def _expect(name: str, found: str | None, minor: str) -> None:
    if found is None:
        raise EnvironmentMismatch(f"{name}: expected {minor}, found none: {INSTALL}")
    if not found.startswith(minor + "."):
        raise EnvironmentMismatch(f"{name}: expected {minor}, found {found}: {INSTALL}")
