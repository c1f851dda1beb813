"""Run a module as `python -m` does, as if `pip install tbe-serving` had installed no extra::

python -m tests.support.client_only MODULE [ARGUMENT ...]
"""

import importlib.metadata
import runpy
import sys
from typing import Any

# What the extras of pyproject.toml bring, by package and by what is imported of it.
_DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "nvidia-pytriton")
_MODULES = ("fbgemm_gpu", "jinja2", "matplotlib", "pytriton", "safetensors", "torch", "torchrec", "yaml")


class _Without:
    """A finder that does not find some packages."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *where: Any) -> Any:
        return None if name.partition(".")[0] in _MODULES else self._finder.find_spec(name, *where)


def main() -> None:
    found = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name in _DISTRIBUTIONS:
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        return found(distribution_name)

    importlib.metadata.version = version
    sys.meta_path[:] = [_Without(each) for each in sys.meta_path]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
