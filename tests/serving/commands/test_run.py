"""`tbe-serve run`."""

from pathlib import Path

from tests.support.servers import tbe_serve


def test_run_on_no_repository_says_so(tmp_path: Path) -> None:
    done = tbe_serve("run", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected models made by tbe-export, found none" in done.stderr
