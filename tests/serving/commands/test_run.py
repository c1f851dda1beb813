"""`tbe-serve run`."""

from pathlib import Path

import pytest

from tests.support.servers import tbe_serve


def test_run_on_no_repository_says_so(tmp_path: Path) -> None:
    done = tbe_serve("run", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected models made by tbe-export, found none" in done.stderr


@pytest.mark.parametrize("named", ["m", "m/1"])
def test_run_on_a_model_or_a_version_names_its_repository(tmp_path: Path, named: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "manifest.json").write_text("{}")
    done = tbe_serve("run", str(tmp_path / named))
    assert done.returncode == 1
    assert done.stderr.endswith(f"found none: the repository is {tmp_path}\n")
