"""Packages that do not work together are refused with what to install."""

import pytest
import torch

from serving import pins
from serving.errors import EnvironmentMismatch
from serving.lookup.program import load_fbgemm

GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "tbe-serving": "0.1.0"}


def test_the_installed_packages_work_together() -> None:
    pins.check_pins()
    assert pins.installed().keys() == GOOD.keys()


CPU = "pip install --no-deps --force-reinstall fbgemm-gpu-cpu==1.8.0"
INSTEAD = f"pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu && {CPU}"


@pytest.mark.parametrize(
    ("changed", "wrong", "mending"),
    [
        pytest.param(
            {"torch": "2.12.1"},
            "torch: expected 2.13 or 2.14, found 2.12.1",
            "pip install torch==2.13.0",
            id="torch",
        ),
        pytest.param(
            {"torch": "2.12.1", "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"},
            "torch: expected 2.13 or 2.14, found 2.12.1",
            "pip install torch==2.13.0",
            id="torch beside a CUDA build that fits",
        ),
        pytest.param(
            {"torch": "2.12.1+cpu", "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"},
            "torch: expected 2.13 or 2.14, found 2.12.1+cpu",
            f"pip install torch==2.13.0 && {INSTEAD}",
            id="torch's CPU build beside a CUDA build",
        ),
        pytest.param(
            {"torch": None},
            "torch: expected 2.13 or 2.14, found none",
            "pip install 'tbe-serving[export]'",
            id="no torch",
        ),
        pytest.param(
            {"fbgemm-gpu-cpu": "1.9.0"},
            "fbgemm-gpu-cpu: expected 1.8 beside torch 2.13, found 1.9.0",
            CPU,
            id="fbgemm",
        ),
        pytest.param(
            {"fbgemm-gpu-cpu": None},
            "fbgemm-gpu-cpu: expected 1.8 beside torch 2.13, found none",
            CPU,
            id="no fbgemm",
        ),
        pytest.param(
            {"fbgemm-gpu": "1.8.0"},
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files",
            INSTEAD,
            id="both builds",
        ),
        pytest.param(
            {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"},
            "fbgemm-gpu, the CUDA build: expected a torch with CUDA, found 2.13.0+cpu",
            INSTEAD,
            id="CUDA build without CUDA",
        ),
        pytest.param(
            {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.9.0"},
            "fbgemm-gpu: expected 1.8 beside torch 2.13, found 1.9.0",
            INSTEAD,
            id="newer",
        ),
        pytest.param(
            {"torchrec": "1.18.0"},
            "torchrec: expected 1.8 beside torch 2.13, found 1.18.0",
            "pip install --no-deps torchrec==1.8.0",
            id="torchrec",
        ),
        pytest.param(
            {"torch": "2.14.1+cpu"},
            "fbgemm-gpu-cpu: expected 1.9 beside torch 2.14, found 1.8.0",
            "pip install --no-deps torchrec==1.9.2 && pip install --no-deps --force-reinstall fbgemm-gpu-cpu==1.9.0",
            id="the default's FBGEMM beside another stack's torch",
        ),
        pytest.param(
            {"torch": "2.14.0", "torchrec": "1.9.1", "fbgemm-gpu-cpu": "1.8.0"},
            "fbgemm-gpu-cpu: expected 1.9 beside torch 2.14, found 1.8.0",
            "pip install --no-deps --force-reinstall fbgemm-gpu-cpu==1.9.0",
            id="patch releases fit",
        ),
        pytest.param(
            {"torch": "2.15.0", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"},
            "torch: expected 2.13 or 2.14, found 2.15.0",
            "pip install torch==2.14.1",
            id="a torch that no FBGEMM is built for yet",
        ),
        pytest.param(
            {"torch": "3.0.0a1+git"},
            "torch: expected 2.13 or 2.14, found 3.0.0a1+git",
            "pip install torch==2.14.1 && pip install --no-deps torchrec==1.9.2"
            " && pip install --no-deps --force-reinstall fbgemm-gpu-cpu==1.9.0",
            id="a development build",
        ),
    ],
)
def test_disagreeing_packages_are_named_with_the_command_to_run(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], wrong: str, mending: str
) -> None:
    versions = {name: version for name, version in (GOOD | changed).items() if version}
    monkeypatch.setattr(pins, "installed", lambda: versions)
    with pytest.raises(EnvironmentMismatch) as refused:
        pins.check_pins()
    assert str(refused.value) == f"{wrong}: mend this environment with `{mending}`"


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"torchrec": None}, id="serving needs no torchrec"),
        pytest.param({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0", "torch": "2.13.0"}, id="CUDA build"),
        pytest.param({"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}, id="the second stack"),
    ],
)
def test_agreeing_packages_are_accepted(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None]) -> None:
    versions = {name: version for name, version in (GOOD | changed).items() if version}
    monkeypatch.setattr(pins, "installed", lambda: versions)
    pins.check_pins()


def test_an_unloadable_library_is_named_with_the_command_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FBGEMM's CUDA build is on a machine without a driver, beside a torch that fits it."""

    def fails(_: object) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")

    versions = {"torch": "2.13.0", "fbgemm-gpu": "1.8.0"}
    monkeypatch.setattr(pins, "installed", lambda: versions)
    monkeypatch.setattr(torch.ops, "load_library", fails)
    with pytest.raises(EnvironmentMismatch) as refused:
        load_fbgemm()
    assert "fbgemm_gpu_tbe_inference.so: cannot be loaded: libcuda.so.1: cannot open" in str(refused.value)
    assert str(refused.value).endswith(f"mend this environment with `{INSTEAD}`")
