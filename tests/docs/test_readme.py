"""The README's blocks run, one after another, as a reader would run them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from serving.bundle.opening import open_bundle
from serving.server import Ports, run_server
from tests.support.deadlines import CALLING, PATIENT_S

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def blocks(language: str, start: str = "") -> list[str]:
    found = [text for name, text in BLOCKS if name == language and text.startswith(start)]
    assert found, f"README.md has no {language} block that starts with {start!r}"
    return found


def patient(text: str, address: str) -> str:
    """A block whose client has a server at another address, and may take its time."""
    text = text.replace(", timeout_s=0.2)", ")")
    assert '"localhost:8001", ' in text
    return re.sub(r'"localhost:8001", ("\w+")', rf'"{address}", \1, {PATIENT_S}', text)


def run(text: str, cwd: Path) -> str:
    """A shell block, with our commands as modules of this environment."""
    for command, module in (("tbe-export", "export"), ("tbe-serve", "serving")):
        text = text.replace(command, f"{shlex.quote(sys.executable)} -m {module}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-ec", text], cwd=cwd, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    export, lookup, at_once, in_process, _, _, sharded = blocks("python")
    operate = blocks("", "tbe-serve load")[0].splitlines()
    (serve,) = blocks("", "tbe-serve run")
    (from_shell,) = blocks("", "echo")

    exec(export, names)
    assert names["bundle"] == Path("repository/movies/1").absolute()
    (repository,) = serve.split()[2:]
    with run_server(Path(repository), Ports(grpc=0, http=0, metrics=0), log=tmp_path / "log") as server:
        exec(patient(lookup, server.grpc), names)
        assert names["answer"]["genres"].shape == (3, 16)
        exec(patient(at_once, server.grpc), names)
        assert len(names["answers"]) == 100
        table = run(
            from_shell.replace("movies --table", f"movies --table --url {server.grpc} --timeout-s {PATIENT_S}"), ROOT
        )
        assert table.count("genres") == 3
        for line in operate:
            command, _, _ = line.partition("#")
            verb = command.split()[1]
            at = f" --url {server.grpc}" if verb in ("load", "health", "bench") else ""
            at = f" {server.grpc}" if verb == "status" else at
            at += f" --timeout-s {PATIENT_S}" if verb in CALLING else ""
            brief = " --seconds 0.2" if "bench" in command else ""
            assert run(command.strip() + at + brief, tmp_path)
    exec(in_process, names)
    assert names["answer"]["genres"].shape == (3, 16)
    exec(sharded, names)
    assert len(open_bundle(names["bundle"]).manifest.plan.ranks) == 2


def test_the_shell_export_of_the_readme_runs(tmp_path: Path) -> None:
    command, _, _ = blocks("", "tbe-export model")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("from tests.support.models import collection as build\n")
    save = "import torch; from tests.support.models import collection; torch.save(collection().state_dict(), 'weights.pt')"
    environment = f"export PYTHONPATH={shlex.quote(str(ROOT))}\n"
    out = run(f"{environment}{shlex.quote(sys.executable)} -c {shlex.quote(save)}\n{command}", tmp_path)
    assert f"published {tmp_path / 'repository' / 'movies' / '1'}" in out


RANKER = """
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

def build():
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name])
        for name in ("item_id", "genres")
    ]
    return DLRM(EmbeddingBagCollection(tables), 3, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[8, 1])
"""


def test_the_scores_of_the_readme_are_those_of_torchrec_s_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = [each for each in blocks("", "tbe-export model") if "--scores" in each]
    score, once = [each for each in blocks("python") if "client.score" in each]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(RANKER)
    names: dict[str, Any] = {}
    exec(RANKER, names)
    model = names["build"]().eval()
    torch.save(model.state_dict(), "weights.pt")
    run(f"export PYTHONPATH={shlex.quote(str(ROOT))}\n{command}", tmp_path)
    with run_server(Path("repository"), Ports(grpc=0, http=0, metrics=0), log=tmp_path / "log") as server:
        exec(patient(score, server.grpc), names)
        scores = names["answer"]["scores"]
        exec(patient(once, server.grpc), names)
    kjt = KeyedJaggedTensor(
        ["item_id", "genres"], torch.tensor([7, 8, 3, 5]), lengths=torch.tensor([1, 1, 2, 0], dtype=torch.int32)
    )
    with torch.no_grad():
        expected = model(torch.tensor([[0.5, 1.0, 0.0], [0.0, 2.0, 1.0]]), kjt)
    np.testing.assert_allclose(scores, expected, atol=5e-3)  # its tables are INT8
    assert scores.std() > 0
    pairs = KeyedJaggedTensor(
        ["item_id", "genres"],
        torch.tensor([7, 8, 9, *[3, 5] * 3]),
        lengths=torch.tensor([1] * 3 + [2] * 3, dtype=torch.int32),
    )
    with torch.no_grad():
        expected = model(torch.tensor([[0.5, 1.0, 0.0]] * 3), pairs)
    np.testing.assert_allclose(names["answer"]["scores"], expected, atol=5e-3)


def test_the_plan_of_the_readme_is_drawn(tmp_path: Path) -> None:
    (command,) = blocks("", "tbe-export plan")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("from tests.support.models import collection as build\n")
    run(f"export PYTHONPATH={shlex.quote(str(ROOT))}\n{command}", tmp_path)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_comparisons_of_the_readme_are_written(tmp_path: Path) -> None:
    of_model, of_tables = blocks("", "tbe-export compare")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("from tests.support.models import collection as build\n")
    (tables,) = blocks("toml")
    (tmp_path / "tables.toml").write_text(tables)
    environment = f"export PYTHONPATH={shlex.quote(str(ROOT))}\n"
    for command in (of_model, of_tables):
        out = run(f"{environment}{command.strip()} --seconds 0.01", tmp_path)
        assert "written report/report.html" in out


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_make_target_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text()
    targets = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"`?make ([a-z-]+)", text))
    assert named
    assert named <= {line.split()[0] for line in targets.splitlines()} | {"make"}
