"""The blocks of the README and of the guides run, as a reader would run them, and their figures were measured."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import KeyedJaggedTensor

from benchmarks import peers_scores
from benchmarks.peer_servers import PEERS
from serving.bundle.load import open_bundle
from serving.server import Ports, run_server
from tests.support.commands import tbe_export
from tests.support.deadlines import CALLING, PATIENT_S
from tests.support.servers import tbe_serve

ROOT = Path(__file__).parents[2]
README, CLIENTS, SHARDING = "README.md", "docs/clients.md", "docs/sharding.md"
EXPORT, DTYPES, OPERATING = "docs/export.md", "docs/choose-a-dtype.md", "docs/operating.md"
# Before a command: package.module is one that builds what tests know.
TO_PACKAGE = f"export PYTHONPATH={shlex.quote(str(ROOT))}:.\n"


def blocks(page: str, language: str, start: str = "") -> list[str]:
    """The blocks of a page in a language that start so; there is one at least."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    texts = [text for name, text in every if name == language and text.startswith(start)]
    assert texts, f"{page} has no {language} block that starts with {start!r}"
    return texts


def patient(text: str, address: str) -> str:
    """A block whose client has a server at another address, and may take its time."""
    text = text.replace(", timeout_s=0.2)", ")")
    assert '"localhost:8001", ' in text
    return re.sub(r'"localhost:8001", ("\w+")', rf'"{address}", \1, {PATIENT_S}', text)


def run(text: str, cwd: Path) -> str:
    """A shell block. A command of `tbe-serve` alone runs in this process, all else in a shell, with our commands as
    modules of this environment.
    """
    if text.startswith("tbe-serve ") and not set(text) & set("|;&$"):
        with chdir(cwd):
            served = tbe_serve(*shlex.split(text.replace("\\\n", " "))[1:])
        assert served.returncode == 0, served.stderr
        return served.stdout
    for command, module in (("tbe-export", "export"), ("tbe-serve", "serving")):
        text = text.replace(command, f"{shlex.quote(sys.executable)} -m {module}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-ec", text], cwd=cwd, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def export(command: str, folder: Path) -> str:
    """A command of `tbe-export` that names package.module, in this process: to import torchrec takes seconds."""
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        done = tbe_export(*shlex.split(command.replace("\\\n", " "))[1:])
    for name in ("package.module", "package"):
        sys.modules.pop(name, None)
    assert done.exit_code == 0, done.output
    output: str = done.output
    return output


def package(folder: Path, module: str = "from tests.support.models import collection as build\n") -> None:
    """Make the package.module of the pages, and the weights of what it builds."""
    (folder / "package").mkdir()
    (folder / "package" / "module.py").write_text(module)
    names: dict[str, Any] = {}
    exec(module, names)
    torch.save(names["build"]().state_dict(), folder / "weights.pt")


@dataclass(frozen=True)
class Served:
    folder: Path
    address: str


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What the README exports, served as it says."""
    folder = tmp_path_factory.mktemp("readme")
    (program,) = blocks(README, "python", "from torchrec")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names: dict[str, Any] = {}
        exec(program, names)
    assert names["bundle"] == folder / "repository/movies/1"
    (serve,) = blocks(README, "", "tbe-serve run")
    (repository,) = serve.partition("#")[0].split()[2:]
    with run_server(folder / repository, Ports(grpc=0, http=0, operations=0), log=folder / "log") as server:
        yield Served(folder, server.grpc)


@pytest.mark.parametrize("page", [README, CLIENTS])
def test_lookups_of_a_page_are_answered(page: str, movies: Served) -> None:
    names: dict[str, Any] = {}
    lookup, *_ = blocks(page, "python", "from serving.client import LookupClient")
    exec(patient(lookup, movies.address), names)
    assert names["answer"]["genres"].shape == (3, 16)
    (from_shell,) = blocks(page, "", "echo")
    options = f" --url {movies.address} --timeout-s {PATIENT_S}"
    assert run(from_shell.strip() + options, ROOT).count("genres") == 3


def test_many_lookups_at_once_are_answered(movies: Served) -> None:
    names: dict[str, Any] = {}
    (at_once,) = blocks(CLIENTS, "python", "import asyncio")
    exec(patient(at_once, movies.address), names)
    assert len(names["answers"]) == 100


def test_the_engine_of_the_page_of_clients_answers(movies: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(movies.folder)
    names: dict[str, Any] = {}
    (in_process,) = blocks(CLIENTS, "python", "from serving.engine")
    exec(in_process, names)
    assert names["answer"]["genres"].shape == (3, 16)


@pytest.mark.parametrize("page", [README, OPERATING])
def test_the_commands_of_a_page_run(page: str, movies: Served) -> None:
    for line in blocks(page, "", "tbe-serve load movies")[0].splitlines():
        command, _, _ = line.partition("#")
        verb = command.split()[1]
        options = f" --url {movies.address}" if verb in ("load", "health", "bench") else ""
        options = f" {movies.address}" if verb == "status" else options
        options += f" --timeout-s {PATIENT_S}" if verb in CALLING else ""
        brief = " --seconds 0.2" if "bench" in command else ""
        assert run(command.strip() + options + brief, movies.folder)


@pytest.mark.long
def test_the_shell_export_of_the_page_of_exports_runs(tmp_path: Path) -> None:
    (command,) = [
        text for text in blocks(EXPORT, "", "tbe-export model") if "--checkpoint" in text and "int4" in text
    ]
    package(tmp_path)
    assert f"published {tmp_path / 'repository' / 'movies' / '1'}" in run(f"{TO_PACKAGE}{command}", tmp_path)


@pytest.mark.long
def test_the_sharded_export_of_the_page_of_sharding_runs(tmp_path: Path) -> None:
    (sharded,) = blocks(SHARDING, "python")
    package(tmp_path)
    run(f"{TO_PACKAGE}{shlex.quote(sys.executable)} -c {shlex.quote(sharded)}", tmp_path)
    bundle = open_bundle(tmp_path / "repository" / "movies_on_two_ranks" / "1")
    assert len(bundle.manifest.plan.ranks) == 2


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


def test_the_scores_in_the_readme_are_those_of_torchrec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = blocks(README, "", "tbe-export model")
    of_readme, score, shared_call, frame = (
        text for page in (README, CLIENTS) for text in blocks(page, "python") if "client.score" in text
    )
    assert of_readme == score
    (stream,) = (text for text in blocks(CLIENTS, "python") if "client.stream" in text)
    package(tmp_path, RANKER)
    names: dict[str, Any] = {}
    exec(RANKER, names)
    model = names["build"]().eval()
    model.load_state_dict(torch.load("weights.pt"))
    export(command, tmp_path)
    with run_server(Path("repository"), Ports(grpc=0, http=0, operations=0), log=tmp_path / "log") as server:
        exec(patient(score, server.grpc), names)
        scores = names["answer"]["scores"]
        exec(patient(shared_call, server.grpc), names)
        exec(patient(frame, server.grpc), names)
        exec(patient(stream, server.grpc), names)
        assert len(names["scores"]["scores"]) == 10_000
    kjt = KeyedJaggedTensor(
        ["item_id", "genres"], torch.tensor([7, 8, 3, 5]), lengths=torch.tensor([1, 1, 2, 0], dtype=torch.int32)
    )
    with torch.no_grad():
        expected = model(torch.tensor([[0.5, 1.0, 0.0], [0.0, 2.0, 1.0]]), kjt)
    np.testing.assert_allclose(scores, expected, atol=5e-3)  # its tables are INT8
    assert scores.std() > 0
    assert names["scored"].columns == ["user", "item_id", "genres", "dense_features", "scores"]
    np.testing.assert_allclose(names["scored"]["scores"].to_numpy(), scores[:, 0], atol=1e-5)
    pairs = KeyedJaggedTensor(
        ["item_id", "genres"],
        torch.tensor([7, 8, 9, *[3, 5] * 3]),
        lengths=torch.tensor([1] * 3 + [2] * 3, dtype=torch.int32),
    )
    with torch.no_grad():
        expected = model(torch.tensor([[0.5, 1.0, 0.0]] * 3), pairs)
    np.testing.assert_allclose(names["answer"]["scores"], expected, atol=5e-3)


@pytest.mark.long
def test_the_plan_of_the_page_of_sharding_is_drawn(tmp_path: Path) -> None:
    in_process, on_hosts = blocks(SHARDING, "", "tbe-export plan")
    package(tmp_path)
    run(f"{TO_PACKAGE}{in_process}", tmp_path)
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    # The tables of the package are so small that the router would hold all of them, and nothing was captured.
    on_hosts = re.sub(r" --traffic \S+", "", on_hosts.replace("300MB", "0B"))
    assert "movies" not in on_hosts
    assert "host 0" in run(f"{TO_PACKAGE}{on_hosts}", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1], ids=["model", "tables"])
def test_the_compare_commands_of_the_sharding_page_write_a_report(tmp_path: Path, number: int) -> None:
    command = blocks(SHARDING, "", "tbe-export compare")[number]
    package(tmp_path)
    (tables,) = blocks(SHARDING, "toml")
    (tmp_path / "tables.toml").write_text(tables)
    out = run(f"{TO_PACKAGE}{command.strip()} --seconds 0.01", tmp_path)
    assert "written report/report.html" in out


@pytest.mark.long
def test_the_dtypes_that_the_page_recommends_are_exported(tmp_path: Path) -> None:
    (commands,) = blocks(DTYPES, "", "tbe-export compare")
    package(tmp_path, RANKER)
    random = np.random.default_rng(0)
    rows = {
        "item_id": random.integers(20, size=300),
        "genres": [[1, 2], [], [3]] * 100,
        "dense_features": random.random((300, 3)).tolist(),
        "click": random.integers(2, size=300),
    }
    pq.write_table(pa.table(rows), tmp_path / "day.parquet")
    out = run(f"{TO_PACKAGE}{commands}", tmp_path)
    assert "* Recommended dtypes: " in out
    assert re.search(r"^published .*repository/ranker/1$", out, re.MULTILINE)


# The rows of the README's table: what is measured, and what is best of it.
MEASURED = {
    "128 samples, one client: median": ("dlrm_1m", "c1_b128_p50_s", min),
    "128 samples, 8 clients": ("dlrm_1m", "c8_b128_rps", max),
    "1 sample, 32 clients": ("dlrm_1m", "c32_b1_rps", max),
    "128 scores of histories, 32 clients": ("scores_sequences", "c32_b128_rps", max),
}
# Who is asked, and how many servers these are; Redis has no model.
ASKED = {"dlrm_1m": (PEERS, 8), "scores_sequences": (peers_scores.SERVERS, 7)}
RANKING_PEERS = ("grpc_aio_once", "grpc_aio_repeated")
NAMES = {
    "plain gRPC": "grpc_aio_fp32",
    "plain gRPC, torch's int8": "grpc_aio_int8",
    "TorchServe": "torchserve_fp32",
    "Mosec": "mosec_fp32",
}


def test_the_comparisons_in_the_readme_match_the_last_quiet_benchmark() -> None:
    runs = sorted((ROOT / "benchmarks" / "results").glob("2*.json"))
    (name, latest) = [(run.name, figures) for run in runs if quiet(figures := json.loads(run.read_text()))][-1]
    assert f"(benchmarks/results/{name})" in (ROOT / README).read_text()
    assert f"on {['two', 'three', 'four'][latest['machine']['cores'] - 2]} cores" in (ROOT / README).read_text()
    results = latest["results"]
    rows = re.findall(r"^\| (1.*?) \| (\S+).*? \| (\S+) .*?\((.*)\) \|$", (ROOT / README).read_text(), re.MULTILINE)
    assert [what for what, *_ in rows] == list(MEASURED)
    for what, ours, best, server in rows:
        model, quantity, best_of = MEASURED[what]
        quantities, servers = ASKED[model]
        figures = {name: results.get(f"{model}_{name}_{quantity}") for name in quantities}
        measured = {name: value for name, value in figures.items() if value is not None}
        assert len({name.rpartition("_")[0] for name in measured}) == servers
        assert best_of(measured, key=measured.__getitem__) == NAMES[server]
        assert (ours, best) == (shown(results[f"{model}_ours_{quantity}"]), shown(best_of(measured.values())))


def test_the_ranking_in_the_readme_matches_the_last_quiet_benchmark() -> None:
    """The others look the user up once and expand it, or repeat it: the better of both counts."""
    latest = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    assert quiet(latest["parts"].get("rankings", latest))
    rates = {name: latest["results"][f"rank_din_{name}_c8_rps"] for name in ("ours_once", *RANKING_PEERS)}
    best = max(rates[name] for name in RANKING_PEERS)
    row = f"8 clients | {rates['ours_once']:.0f} rankings/s | {best:.0f} rankings/s (plain gRPC) |"
    assert f"| [500 items for one user](docs/ranking.md), {row}" in (ROOT / README).read_text()


def quiet(run: Any) -> bool:
    return bool(run.get("others", {}).get("quiet"))


def shown(value: float) -> str:
    """Seconds as milliseconds, or answers a second."""
    return f"{1e3 * value:.1f}" if value < 1 else f"{value:,.0f}"


def test_the_readme_installs_existing_extras() -> None:
    """What pip makes of them is tested in `tests/requirements/test_wheel.py`."""
    (install,) = blocks(README, "", "pip install")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'tbe-serving\[([\w,]+)\]'", install)
    assert len(named) == install.count("tbe-serving") == 3
    assert {extra for group in named for extra in group.split(",")} == {"server", "export"} < set(extras)


def test_the_readme_has_at_most_700_words() -> None:
    assert len((ROOT / README).read_text().split()) <= 700


@pytest.mark.parametrize("page", [README, CLIENTS, SHARDING])
def test_every_block_of_a_page_is_one_that_a_test_runs(page: str) -> None:
    """Whoever adds a block adds it to a test: a block that nothing runs rots."""
    names_by_page = {
        README: {"": 7, "python": 3},
        CLIENTS: {"": 1, "python": 7},
        SHARDING: {"": 7, "python": 1, "text": 3, "toml": 1},
    }
    assert (
        Counter(re.findall(r"^```(\w*)\n.*?^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
        == names_by_page[page]
    )


def test_every_make_target_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text()
    targets = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"`?make ([a-z-]+)", text))
    assert named
    assert named <= {line.split()[0] for line in targets.splitlines()} | {"make"}
