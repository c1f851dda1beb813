"""What stands in a command's output: warnings of the user's own code, none of libraries."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from export.commands.library_warnings import quiet_libraries

# torch says for the first KeyedJaggedTensor of a process that is_fx_tracing is ambiguous, and that nested tensors are
# a prototype. torch.nn.Transformer warns of its own setting, Python of an import.
USERS = """
import logging
import warnings
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

def build():
    KeyedJaggedTensor(keys=["a"], values=torch.arange(2), lengths=torch.ones(2, dtype=torch.int32))
    torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1)
    logging.getLogger("theirs").warning("my vocabulary is old")
    warnings.warn("my table is small")
    return EmbeddingBagCollection(tables=[
        EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["a"]),
    ])
"""


def test_library_warnings_are_hidden(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(USERS)
    command = [sys.executable, "-m", "export", "plan", "--model", "theirs:build", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logged, warned, line = done.stderr.splitlines()
    assert logged.endswith("my vocabulary is old")
    assert warned.endswith("UserWarning: my table is small")
    assert line == '  warnings.warn("my table is small")'


def library(tmp_path: Path, code: str) -> dict[str, object]:
    """The names of a module that is installed."""
    names: dict[str, object] = {}
    exec(compile(code, str(tmp_path / "site-packages" / "library.py"), "exec"), names)
    return names


WARNS = """
import logging, warnings
def warn(): warnings.warn("theirs", stacklevel=2)
def log(): logging.getLogger("library").warning("theirs")
def fail(): logging.getLogger("library").error("broken")
"""


def test_a_library_warning_that_names_a_users_line_is_hidden(tmp_path: Path) -> None:
    warn = library(tmp_path, WARNS)["warn"]
    assert callable(warn)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet_libraries():
            warn()
            warnings.warn("mine", stacklevel=1)
        warn()
    assert [str(warning.message) for warning in shown] == ["mine", "theirs"]


def test_errors_that_a_library_logs_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = library(tmp_path, WARNS)
    with quiet_libraries():
        for name in ("log", "fail"):
            call = names[name]
            assert callable(call)
            call()
        logging.getLogger("users").warning("mine")
    assert caplog.messages == ["broken", "mine"]
