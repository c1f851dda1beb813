"""What commands say of modules that people wrote."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export.__main__ import app as tbe_export
from export.commands.module import build_module, named_example
from tests.support.ranker import ranker

USERS = """
import sys
def deep(x):
    return x["weight"]
def raises():
    return deep({})
def lines():
    raise ValueError("one\\ntwo :x: [red]")
def leaves():
    sys.exit(0)
def asks(size):
    pass
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with somebody's module, which is the working directory."""
    (tmp_path / "theirs.py").write_text(USERS)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        pytest.param("theirs:raises", "KeyError: 'weight' (FOLDER/theirs.py:4)", id="raises"),
        pytest.param("theirs:lines", "ValueError: one two :x: [red] (FOLDER/theirs.py:8)", id="several lines"),
        pytest.param("theirs:leaves", "SystemExit: 0 (FOLDER/theirs.py:10)", id="exits"),
        pytest.param("needs:build", "ModuleNotFoundError: No module named 'no_such_package' (FOLDER/needs.py:1)", id="imports"),
        pytest.param("theirs:asks", "expected package.module:function, without arguments: TypeError", id="arguments"),
        pytest.param("nowhere:build", "No module named 'nowhere': run it in the folder that has it, or set", id="module"),
        pytest.param("theirs", "expected package.module:function, such as theirs:build", id="no function"),
        pytest.param("broken:build", "expected package.module:function, without arguments: SyntaxError", id="syntax"),
    ],
)  # fmt: skip
def test_an_error_in_a_users_module_is_one_line_with_its_location(users: Path, spec: str, said: str) -> None:
    done = CliRunner().invoke(tbe_export, ["plan", "--model", spec])
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 1
    assert line.startswith(f"tbe-export: --model {spec}: ")
    assert said.replace("FOLDER", str(users)) in line


@pytest.mark.parametrize("arguments", [["--verbose", "plan"], ["plan", "--verbose"]])
@pytest.mark.usefixtures("users")
def test_verbose_shows_the_traceback(arguments: list[str]) -> None:
    done = CliRunner().invoke(tbe_export, [*arguments, "--model", "theirs:raises"])
    assert done.exit_code == 1
    assert 'return x["weight"]' in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tbe-export: --model theirs:raises: KeyError")


def test_tables_alone_are_built_on_the_meta_device() -> None:
    """What other modules compute when they are built may be in no checkpoint."""
    module = build_module("tests.support.ranker:ranker", meta=True)
    on_meta = {name: weights.is_meta for name, weights in module.named_parameters()}
    assert on_meta == {name: name.startswith("embeddings.") for name in on_meta}
    assert set(on_meta.values()) == {True, False}
    assert not any(weights.is_meta for weights in ranker().parameters())


def test_an_example_draws_the_same_random_numbers_in_every_run(users: Path) -> None:
    (users / "drawn.py").write_text(
        "import random\nimport numpy, torch\n"
        "once = torch.rand(3)\n"
        "def example(): return once, torch.rand(3), numpy.random.rand(3), random.random()\n"
    )
    draws = []
    for _ in range(2):
        draws.append(str(named_example("drawn:example")))  # seeds, so the second call does not continue the first
        del sys.modules["drawn"]
    assert draws[0] == draws[1]
