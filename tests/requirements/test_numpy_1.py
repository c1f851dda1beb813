"""numpy 1.26, which pip installs with `tbe-serving[server]`, as nvidia-pytriton requires it: the locks have numpy 2."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    *("tests/serving/lookup", "tests/serving/test_once.py"),
    *(
        "tests/serving/test_sequences.py",
        "tests/serving/test_jagged_scores.py",
        "tests/serving/test_rows_of_tables.py",
    ),
    # With a tritonserver. Today's pandas and pyarrow need numpy 2.
    *("tests/serving/backend/test_dlpack.py", "tests/serving/backend/test_triton.py", "-k", "not pandas"),
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_engines_and_servers_answer_under_numpy_1(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    fetch = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), "numpy==1.26.*")
    subprocess.run([sys.executable, *fetch], check=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    # All else is of this environment.
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    version = subprocess.run(
        [python, "-c", "import numpy; print(numpy.__version__)"], capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("1.26.")
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
