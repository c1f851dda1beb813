"""The clients of examples/clients in other languages: built with Debian's packages, they say what our own client says."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from export import ExportConfig, export_model
from serving.client import LookupClient
from serving.errors import InvalidRequest
from tests.support.servers import Running, running

CLIENTS = Path(__file__).parents[2] / "examples/clients"
COMMANDS = {
    "go": ("./ranker",),
    "java": ("java", "-cp", ".:/usr/share/java/*", "Ranker"),
    "cpp": ("./ranker",),
    "node": ("node", "ranker.mjs"),
}
IDS = {"genres": [[3, 5], []], "item_id": [[7], [8]]}
DENSE = {"dense_features": [[0.5, 1.0, 0.0], [0.0, 2.0, 1.0]]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The ranker of the README."""
    repository = tmp_path_factory.mktemp("clients") / "r"
    tables = [
        EmbeddingBagConfig(name=key, num_embeddings=20, embedding_dim=8, feature_names=[key])
        for key in ("item_id", "genres")
    ]
    torch.manual_seed(0)
    model = DLRM(EmbeddingBagCollection(tables), 3, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[8, 1])
    export_model(model.eval(), repository, "ranker", ExportConfig(scores=True))
    with running(repository) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("language", [*COMMANDS])
def test_a_client_says_what_ours_says(language: str, server: Running, tmp_path: Path) -> None:
    subprocess.run([CLIENTS / "build.sh", language, tmp_path], check=True)
    command = [*COMMANDS[language], server.grpc, "ranker"]
    if language == "node":
        command.append(str(CLIENTS.parents[1] / "serving/protocol/descriptors.binpb"))
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()

    with LookupClient(server.grpc, "ranker", 60) as client:
        answer = client.lookup(IDS)
        first = answer["genres"][0, 0]
        scores = client.score(IDS, DENSE)["scores"][:, 0]
        with pytest.raises(InvalidRequest) as refusal:
            client.lookup(IDS | {"item_id": [[7], [1 << 40]]})
    assert len({*scores}) == 2
    said, said_scores, refused = lines
    assert re.fullmatch(r"embeddings \[2 16\] of version 1, the first (\S+)", said)
    assert float(said.split()[-1]) == pytest.approx(first, abs=2e-6)
    assert [float(number) for number in said_scores.removeprefix("scores [").removesuffix("]").split()] == (
        pytest.approx(scores, abs=2e-6)
    )
    assert refused.startswith("refused: feature 'item_id': expected an id in [0, 20), got 1099511627776")
    assert str(refusal.value).endswith(refused.removeprefix("refused: "))

    assert "usage: " in subprocess.run(command[:-1], cwd=tmp_path, capture_output=True, text=True).stderr
    command[command.index("ranker")] = "no_such_model"
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "no_such_model" in failed.stderr
