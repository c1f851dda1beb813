"""What a process that answers does not import: FBGEMM's Python package, and what torch needs to trace alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving.errors import EnvironmentMismatch
from serving.lookup import program
from tests.support.long_cases import one_in


@pytest.mark.parametrize("model", one_in(2, ["sharded", "mixed"]))
def test_a_lookup_imports_no_python_of_fbgemm(repository: Path, model: str) -> None:
    """It would bring 500 modules and 35 MB into each instance."""
    path = repository / model / "1"
    code = (
        "import sys; from serving.engine import Engine; "
        f"print(Engine.open({str(path)!r}).lookup({{'user_id': [[3]]}})['user_id'].shape, "
        "[name for name in sys.modules if name.split('.')[0] in ('fbgemm_gpu', 'torchrec', 'sympy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 16) []"


def test_a_model_process_answers_without_packages_for_tracing(repository: Path) -> None:
    path = repository / "sharded" / "1"
    code = (
        "import sys; from types import ModuleType; "
        "sys.modules['triton_python_backend_utils'] = ModuleType('triton_python_backend_utils'); "
        "from serving.backend import TritonPythonModel; from serving.engine import Engine; "
        f"print(Engine.open({str(path)!r}).lookup({{'user_id': [[3]]}})['user_id'].shape, "
        "[name for name in sys.modules if name.startswith(('torch._decomp', 'torch._refs'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 16) []"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_LIBRARIES", ("fbgemm_gpu_none.so",))
    with pytest.raises(
        EnvironmentMismatch, match=r"fbgemm_gpu_none\.so: expected a library of FBGEMM, found none: mend this"
    ):
        program.load_fbgemm()
