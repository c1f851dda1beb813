"""Packages that do not work together are refused with what to install."""

import pytest

from serving import pins
from serving.errors import EnvironmentMismatch

GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "tbe-serving": "0.1.0"}


def test_the_installed_packages_work_together() -> None:
    pins.check_pins()
    assert pins.installed().keys() == GOOD.keys()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"torch": "2.12.1"}, r"torch: expected 2\.13, found 2\.12\.1: install", id="torch"),
        pytest.param({"torch": None}, r"torch: expected 2\.13, found none", id="no torch"),
        pytest.param({"fbgemm-gpu-cpu": "1.9.0"}, r"fbgemm-gpu-cpu: expected 1\.8, found 1\.9\.0", id="fbgemm"),
        pytest.param({"fbgemm-gpu-cpu": None}, r"fbgemm-gpu-cpu: expected 1\.8, found none", id="no fbgemm"),
        pytest.param({"fbgemm-gpu": "1.8.0"}, "both installed and overwrite each other", id="both builds"),
        pytest.param({"torchrec": "1.18.0"}, r"torchrec: expected 1\.8, found 1\.18\.0", id="torchrec"),
    ],
)
def test_what_does_not_agree_is_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    found = {name: version for name, version in (GOOD | changed).items() if version}
    monkeypatch.setattr(pins, "installed", lambda: found)
    with pytest.raises(EnvironmentMismatch, match=message) as refused:
        pins.check_pins()
    assert "requirements/serve.txt" in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"torchrec": None}, id="serving needs no torchrec"),
        pytest.param({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, id="CUDA build"),
    ],
)
def test_what_agrees_is_taken(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None]) -> None:
    found = {name: version for name, version in (GOOD | changed).items() if version}
    monkeypatch.setattr(pins, "installed", lambda: found)
    pins.check_pins()
