"""torch as it may become: without TorchScript."""

from enum import StrEnum

import pytest

# What of torch.jit compiles, saves, loads or names a program. torch's own decorators stay: torchrec applies them.
_NAMES = ("script", "trace", "freeze", "load", "save", "ScriptModule", "ScriptFunction", "export", "is_scripting")


class NoTorchScript(StrEnum):
    """How a release of torch is without TorchScript."""

    RAISES = "raises"
    REMOVED = "removed"


def remove_torchscript(monkeypatch: pytest.MonkeyPatch, how: NoTorchScript) -> None:
    """Have `torch.jit` raise, or lack what TorchScript needs, until the test ends."""
    import torch

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("TorchScript is not supported in Python 3.14+")

    for name in _NAMES:
        if how is NoTorchScript.REMOVED:
            monkeypatch.delattr(torch.jit, name)
        elif name not in ("ScriptModule", "ScriptFunction", "is_scripting"):
            monkeypatch.setattr(torch.jit, name, fail)
