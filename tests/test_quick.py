"""`make quick` leaves out what needs torch or starts a server, and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {
    "test_plain.py": "def test_plain(): pass",
    "test_torch.py": "import torch\n\ndef test_with_torch(): pass",
    "test_program.py": "import subprocess\n\nsubprocess.run(['python3', '--version'])\n\ndef test_behind(): pass",
    "test_within.py": """
import subprocess, sys
import pytest

@pytest.fixture
def trained():
    import torch

def test_its_fixture_imports_torch(trained): pass
def test_a_fixture_of_all_imports_torch(one_model): pass
def test_it_exports():
    from export import export_model
def test_it_starts_python(): subprocess.run([sys.executable, "-c", "import torch"])
def test_it_starts_a_server(): subprocess.Popen(["/opt/tritonserver/bin/tritonserver", "--model-repository", "/r"])
def test_it_starts_another_program(): subprocess.run(["true"], check=True)
""",
}


def test_tests_that_need_torch_or_a_server_are_skipped(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    plugins = ["-p", "no:xdist", "-p", "tests.support.quick", "-p", "tests.conftest"]
    options = ["-c", str(ROOT / "pyproject.toml"), "-rpsf", "--basetemp", str(tmp_path / "base"), str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *plugins, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = {line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    assert passed == {"test_plain", "test_it_starts_another_program"}, done.stdout
    assert " 2 passed, 7 skipped in " in done.stdout


def test_no_conftest_imports_torch() -> None:
    """It would leave out all tests beside it."""
    conftests = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in ROOT.glob("tests/**/conftest.py")
    ]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *conftests], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
