"""numpy 2, which Triton has from 25.02 on: engines answer as under numpy 1. (The tritonserver of the wheel is older.)"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_A_SERVER = (
    *("tests/serving/lookup", "tests/serving/test_engine.py", "tests/serving/test_once.py"),
    *(
        "tests/serving/test_sequences.py",
        "tests/serving/test_jagged_scores.py",
        "tests/serving/test_rows_of_tables.py",
    ),
)


@pytest.mark.long
def test_engines_answer_under_numpy_2(tmp_path: Path) -> None:
    """All that the model's process does is theirs, but for what Triton hands over."""
    installed = tmp_path / "numpy"
    fetch = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), "numpy>=2.1,<3")
    subprocess.run([sys.executable, *fetch], check=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    said = [sys.executable, "-c", "import numpy; print(numpy.__version__)"]
    assert subprocess.run(said, env=environment, capture_output=True, text=True, check=True).stdout.startswith("2.")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WITHOUT_A_SERVER]
    done = subprocess.run(tests, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
