"""Run commands as if `pip install tbe-serving` had installed no extra: `python -m tests.support.client_only`.

It reads a program and its arguments for each, and writes its code, its output, its errors and its exception, in JSON.
Each has a process that has imported both programs and nothing else. That is forked: to import them takes a second.
"""

import importlib.metadata
import json
import multiprocessing
import sys
from importlib import import_module
from typing import Any

# What the extras of pyproject.toml bring, by package and by what is imported of it.
_DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "nvidia-pytriton", "tritonclient")
_MODULES = (
    *(
        "fbgemm_gpu",
        "jinja2",
        "matplotlib",
        "obstore",
        "pyarrow",
        "pytriton",
        "safetensors",
        "torch",
        "torchrec",
        "tritonclient",
    ),
    "yaml",
)


class _Without:
    """A finder that does not find some packages."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name.partition(".")[0] in _MODULES else self._finder.find_spec(name, *where)


def main() -> None:
    find_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name in _DISTRIBUTIONS:
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return find_version(distribution_name)

    importlib.metadata.version = version
    sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
    for program in ("export", "serving"):
        import_module(f"{program}.__main__")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        json.dump(pool.map(_run, json.load(sys.stdin), chunksize=1), sys.stdout)


def _run(typed: list[str]) -> tuple[int, str, str, str]:
    from typer.testing import CliRunner

    program, *arguments = typed
    done = CliRunner().invoke(import_module(f"{program}.__main__").app, arguments)
    return done.exit_code, done.stdout, done.stderr, repr(done.exception)


if __name__ == "__main__":
    main()
