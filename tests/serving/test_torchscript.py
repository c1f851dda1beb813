"""TorchScript works in this process, or the reason why not is said in a line."""

import warnings

import pytest
import torch

from serving.torchscript import torchscript_error
from tests.support.no_torchscript import NoTorchScript, remove_torchscript


def test_torchscript_works() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torchscript_error() is None


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        pytest.param(NoTorchScript.RAISES, "RuntimeError: TorchScript is not supported in Python 3.14+", id="raises"),
        pytest.param(NoTorchScript.REMOVED, "AttributeError: module 'torch.jit' has no attribute", id="removed"),
    ],
)
def test_the_reason_is_torch_s_own(monkeypatch: pytest.MonkeyPatch, how: NoTorchScript, expected: str) -> None:
    remove_torchscript(monkeypatch, how)
    assert (torchscript_error() or "").startswith(expected)


@pytest.mark.parametrize("name", ["script", "load", "freeze"])
def test_each_step_is_tried(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FutureWarning(f"{name} will be removed\nin a later release")

    monkeypatch.setattr(torch.jit, name, fail)
    assert torchscript_error() == f"FutureWarning: {name} will be removed"
