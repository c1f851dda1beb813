"""The notebooks of examples/notebooks run in Jupyter's kernel, whose event loop is running."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"


@pytest.mark.long  # `test_movielens.py` trains, exports and serves the same model from a program
@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1]))
    copy = Path(shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path))
    content: Any = nbformat.reads(copy.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(content)
    assert not any(cell.get("outputs") for cell in content.cells), "outputs are not kept: they would be stale"
    NotebookClient(content, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert not [cell for cell in content.cells if cell.cell_type == "code" and cell.execution_count is None]
