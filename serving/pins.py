"""The versions of packages that work together, which are checked before torch or FBGEMM is used."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from serving.errors import EnvironmentMismatch

_PYTRITON = "0.7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Releases of torch, torchrec and FBGEMM that were built for one another (FBGEMM's release table).

    Other patch releases of the same minor versions also work.
    """

    torch: str
    torchrec: str
    fbgemm: str


# The stacks that our tests run with. The first is the default: requirements/*.in and pyproject.toml pin it.
# A new stack is a line here, its lock (requirements/stack.in), and its row in docs/versions.md.
STACKS = (
    Stack(torch="2.13.0", torchrec="1.8.0", fbgemm="1.8.0"),
    Stack(torch="2.14.1", torchrec="1.9.2", fbgemm="1.9.0"),
)
DEFAULT_STACK = STACKS[0]


def check_pins() -> None:
    """Compare the installed torch, fbgemm-gpu and torchrec with the stacks that work.

    torchrec may be missing: serving does not need it.

    Raises:
        EnvironmentMismatch: a package is missing or belongs to another stack than torch; or both builds of FBGEMM are
            installed, or its CUDA build beside torch's CPU build. The message has the command that repairs it.
    """
    wrong = next(_wrong(installed()), None)
    if wrong is not None:
        raise mismatch(wrong)


def mismatch(wrong: str, *, is_broken: bool = False) -> EnvironmentMismatch:
    """The error for a broken environment, with the command that repairs it.

    Args:
        wrong: what is wrong.
        is_broken: whether FBGEMM must be replaced although its version fits.
    """
    return EnvironmentMismatch(f"{wrong}: mend this environment with `{_mended_by(installed(), is_broken)}`")


def not_installed(package: str, extra: str) -> EnvironmentMismatch:
    """The error for a package that is missing, with the command that installs it.

    Args:
        package: the name of the package.
        extra: the extra of pyproject.toml that installs it.
    """
    return EnvironmentMismatch(f"{package}: expected this package, found none: `pip install 'tbe-serving[{extra}]'`")


def stack_of(packages: Mapping[str, str]) -> Stack | None:
    """The stack that the installed torch belongs to, or None.

    Args:
        packages: the version of each installed package, by name.
    """
    return next((stack for stack in STACKS if _has(packages, "torch", stack.torch)), None)


def _mended_by(packages: Mapping[str, str], is_broken: bool) -> str:
    """The command that repairs an environment, and keeps the packages that fit."""
    if "torch" not in packages:  # an export checks first; serving imports torch before its check
        return "pip install 'tbe-serving[export]'"
    stack, steps = stack_of(packages), []
    if stack is None:
        newest = max(STACKS, key=lambda stack: _numbers(stack.torch))
        stack = newest if _numbers(packages["torch"]) > _numbers(newest.torch) else DEFAULT_STACK
        steps.append(f"pip install torch=={stack.torch}")
    if "torchrec" in packages and not _has(packages, "torchrec", stack.torchrec):
        steps.append(f"pip install --no-deps torchrec=={stack.torchrec}")
    if _fbgemm_fits(packages, stack) and not is_broken:
        return " && ".join(steps)
    if "fbgemm-gpu" in packages:  # pip has no way to say "this instead of that", and their files have the same names
        steps.append("pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu")
    steps.append(f"pip install --no-deps --force-reinstall fbgemm-gpu-cpu=={stack.fbgemm}")
    return " && ".join(steps)


def _fbgemm_fits(packages: Mapping[str, str], stack: Stack) -> bool:
    """Whether there is one build of FBGEMM, of the right version, and no CUDA build beside torch's CPU build."""
    builds = packages.keys() & {"fbgemm-gpu", "fbgemm-gpu-cpu"}
    is_cuda_alone = "fbgemm-gpu" in builds and packages.get("torch", "").endswith("+cpu")
    return len(builds) == 1 and all(_has(packages, build, stack.fbgemm) for build in builds) and not is_cuda_alone


def _wrong(packages: Mapping[str, str]) -> Iterator[str]:
    """The packages that do not work together, in lines, the most important one first."""
    stack = stack_of(packages)
    if stack is None:
        known_minors = " or ".join(_minor(known_stack.torch) for known_stack in STACKS)
        yield f"torch: expected {known_minors}, found {packages.get('torch', 'none')}"
        return
    beside_torch = f" beside torch {_minor(stack.torch)}"
    if "fbgemm-gpu-cpu" in packages and "fbgemm-gpu" in packages:
        yield "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files"
    build = "fbgemm-gpu" if "fbgemm-gpu" in packages else "fbgemm-gpu-cpu"
    if not _has(packages, build, stack.fbgemm):
        yield f"{build}: expected {_minor(stack.fbgemm)}{beside_torch}, found {packages.get(build, 'none')}"
    if build == "fbgemm-gpu" and packages.get("torch", "").endswith("+cpu"):
        yield f"fbgemm-gpu, the CUDA build: expected a torch with CUDA, found {packages['torch']}"
    if "torchrec" in packages and not _has(packages, "torchrec", stack.torchrec):
        yield f"torchrec: expected {_minor(stack.torchrec)}{beside_torch}, found {packages['torchrec']}"


def _has(packages: Mapping[str, str], name: str, release: str) -> bool:
    """Whether the installed version of a package has the minor version of `release`."""
    return packages.get(name, "").startswith(f"{_minor(release)}.")


def _minor(release: str) -> str:
    """The minor version of a release: "2.13" for "2.13.0"."""
    return release.rpartition(".")[0]


def _numbers(release: str) -> tuple[int, ...]:
    """Major and minor version, for comparisons. A version without such numbers counts as old."""
    numbers = release.split(".")[:2]
    return tuple(int(number) if number.isdigit() else 0 for number in numbers)


def installed() -> dict[str, str]:
    """The version of each installed package that a bundle depends on, by name."""
    names = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "tbe-serving")
    return {name: release for name in names if (release := _version(name)) is not None}


@cache
def _version(name: str) -> str | None:
    """The version of a package, which is cached: reading it takes milliseconds, and each engine needs it."""
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def tested_versions() -> list[str]:
    """Lines with the installed and the tested versions of each package; this package comes first."""
    packages = installed()
    tested = {
        "torch": " and ".join(_minor(stack.torch) for stack in STACKS),
        "torchrec": " and ".join(_minor(stack.torchrec) for stack in STACKS),
        "fbgemm-gpu-cpu": " and ".join(_minor(stack.fbgemm) for stack in STACKS),
        "nvidia-pytriton": _PYTRITON,
    }
    if "fbgemm-gpu" in packages:
        tested["fbgemm-gpu"] = tested.pop("fbgemm-gpu-cpu")
    if (triton := _version("nvidia-pytriton")) is not None:
        packages["nvidia-pytriton"] = triton
    lines = [f"{name} {packages.get(name, 'not installed')} (tested with {minor})" for name, minor in tested.items()]
    return [f"tbe-serving {packages.get('tbe-serving', 'not installed')}", *lines]
