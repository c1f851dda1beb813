"""`make quick`: a plugin of pytest that leaves out what needs torch or a server, found by its doing.

Nobody keeps a list. A test file, a fixture or a test that imports torch is skipped there and then; so is a test that
starts one of our programs in a process of its own, which may import torch or be a server.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TORCH = ("fbgemm_gpu", "torch", "torchrec")


class _NoTorch(MetaPathFinder):
    def find_spec(self, name: str, _: Sequence[str] | None, __: ModuleType | None = None) -> ModuleSpec | None:
        if name in TORCH:
            pytest.skip(f"needs {name}", allow_module_level=True)
        return None


def _no_programs(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and (name := _program(arguments[1])):
        pytest.skip(f"starts {name}", allow_module_level=True)


def _program(command: Sequence[Any] | str | bytes) -> str:
    """What of ours a command starts: Python, which could import anything, or a server. Nothing, otherwise."""
    names = [] if isinstance(command, str | bytes) else [Path(str(part)).name for part in command]
    return next((name for name in names if name.startswith(("python", "tbe-", "tritonserver"))), "")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Not earlier: xdist starts its workers before."""
    assert not sys.modules.keys() & {*TORCH}, "torch was imported before tests were collected"
    sys.meta_path.insert(0, _NoTorch())
    sys.addaudithook(_no_programs)
