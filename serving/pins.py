"""Which versions of packages work together. This is checked before torch or FBGEMM is used."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from serving.errors import EnvironmentMismatch

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
            installed, or its CUDA build beside torch's CPU build. The message has the command that mends it.
    """
    wrong = next(_wrong(installed()), None)
    if wrong is not None:
        raise mismatch(wrong)


def mismatch(wrong: str, *, is_broken: bool = False) -> EnvironmentMismatch:
    """The error for an environment in which something is wrong, with the command that mends all of it.

    Args:
        wrong: what is wrong.
        is_broken: whether FBGEMM has to be replaced, though its version fits.
    """
    return EnvironmentMismatch(f"{wrong}: mend this environment with `{_mended_by(installed(), is_broken)}`")


def _mended_by(found: Mapping[str, str], is_broken: bool) -> str:
    """The command that makes packages agree. It lets be what fits."""
    if "torch" not in found:  # an export looks first; what serves imports torch before it asks
        return "pip install 'tbe-serving[export]'"
    steps = []
    if not _has(found, "torch", _TORCH):
        steps.append(f"pip install torch=={_TORCH}.0")
    if "torchrec" in found and not _has(found, "torchrec", _TORCHREC):
        steps.append(f"pip install --no-deps torchrec=={_TORCHREC}.0")
    if _fbgemm_fits(found) and not is_broken:
        return " && ".join(steps)
    if "fbgemm-gpu" in found:  # pip has no way to say "this instead of that", and their files have the same names
        steps.append("pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu")
    steps.append(f"pip install --no-deps --force-reinstall fbgemm-gpu-cpu=={_FBGEMM}.0")
    return " && ".join(steps)


def _fbgemm_fits(found: Mapping[str, str]) -> bool:
    """Whether there is one build of FBGEMM, of the right version, and no CUDA build beside torch's CPU build."""
    builds = found.keys() & {"fbgemm-gpu", "fbgemm-gpu-cpu"}
    is_cuda_alone = "fbgemm-gpu" in builds and found.get("torch", "").endswith("+cpu")
    return len(builds) == 1 and all(_has(found, each, _FBGEMM) for each in builds) and not is_cuda_alone


def _wrong(found: Mapping[str, str]) -> Iterator[str]:
    """What does not agree, most important first."""
    if not _has(found, "torch", _TORCH):
        yield f"torch: expected {_TORCH}, found {found.get('torch', 'none')}"
    if "fbgemm-gpu-cpu" in found and "fbgemm-gpu" in found:
        yield "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files"
    name = "fbgemm-gpu" if "fbgemm-gpu" in found else "fbgemm-gpu-cpu"
    if not _has(found, name, _FBGEMM):
        yield f"{name}: expected {_FBGEMM}, found {found.get(name, 'none')}"
    if name == "fbgemm-gpu" and found.get("torch", "").endswith("+cpu"):
        yield f"fbgemm-gpu, the CUDA build: expected a torch with CUDA, found {found['torch']}"
    if "torchrec" in found and not _has(found, "torchrec", _TORCHREC):
        yield f"torchrec: expected {_TORCHREC}, found {found['torchrec']}"


def _has(found: Mapping[str, str], name: str, minor: str) -> bool:
    return found.get(name, "").startswith(f"{minor}.")


def installed() -> dict[str, str]:
    """The version of each installed package that a bundle depends on, by name."""
    names = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "tbe-serving")
    return {name: found for name in names if (found := _version(name)) is not None}


@cache
def _version(name: str) -> str | None:
    """The version of a package. It is read once: that takes milliseconds, and each engine asks."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def tested_versions() -> list[str]:
    """Lines with the installed and the tested version of each package; this package comes first."""
    found = installed()
    tested = {"torch": _TORCH, "torchrec": _TORCHREC, "fbgemm-gpu-cpu": _FBGEMM, "nvidia-pytriton": _PYTRITON}
    if "fbgemm-gpu" in found:
        tested["fbgemm-gpu"] = tested.pop("fbgemm-gpu-cpu")
    if (triton := _version("nvidia-pytriton")) is not None:
        found["nvidia-pytriton"] = triton
    lines = [f"{name} {found.get(name, 'not installed')} (tested with {minor})" for name, minor in tested.items()]
    return [f"tbe-serving {found.get('tbe-serving', 'not installed')}", *lines]
