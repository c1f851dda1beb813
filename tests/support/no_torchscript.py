"""torch as it may become: without TorchScript."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import pytest

# What of torch.jit compiles, saves and loads a program. What torch and torchrec themselves name of it stays.
FUNCTIONS = ("script", "trace", "freeze", "load", "save", "export")


class NoTorchScript(StrEnum):
    """How a release of torch is without TorchScript."""

    RAISES = "raises"
    REMOVED = "removed"


def remove_torchscript(monkeypatch: pytest.MonkeyPatch, how: NoTorchScript) -> None:
    """Have `torch.jit` raise, or lack what TorchScript needs, until the test ends."""
    import torch

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("TorchScript is not supported in Python 3.14+")

    for name in FUNCTIONS:
        if how is NoTorchScript.REMOVED:
            monkeypatch.delattr(torch.jit, name)
        else:
            monkeypatch.setattr(torch.jit, name, fail)


@contextmanager
def without_torchscript(how: NoTorchScript = NoTorchScript.RAISES) -> Iterator[None]:
    """Inside the block, torch is without TorchScript."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        remove_torchscript(monkeypatch, how)
        yield
