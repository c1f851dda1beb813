"""The page about ranking: its export, its requests and its measurement, as it has them."""

from pathlib import Path
from typing import Any

import pytest

from serving.server import run_server
from tests.docs.test_readme import TO_PACKAGE, blocks, package, patient, run
from tests.support.deadlines import PATIENT_S
from tests.support.servers import FREE, metric

PAGE = "docs/ranking.md"
RANKER = """
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

class Ranker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection([
            EmbeddingBagConfig(name=name, num_embeddings=1000, embedding_dim=64, feature_names=[name])
            for name in ("user_id", "history", "item_id")
        ])
        self.layers = torch.nn.Sequential(torch.nn.Linear(193, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def forward(self, ids, price):
        return self.layers(torch.cat([self.bags(ids).values(), price], dim=1)).squeeze(1)

def build():
    return Ranker().eval()
"""


@pytest.mark.long
def test_the_page_runs(tmp_path: Path) -> None:
    package(tmp_path, RANKER)
    export, shell, bench = blocks(PAGE, "")
    (client,) = blocks(PAGE, "python")
    done = run(f"{TO_PACKAGE}{export}", tmp_path)
    assert "user side: user_id, history: " in done
    names: dict[str, Any] = {}
    with run_server(tmp_path / "repository", FREE, log=tmp_path / "log") as server:
        exec(patient(client, server.grpc), names)
        assert names["answer"]["scores"].shape == (500,)
        assert metric(server, "tbe_user_side_total", model="ranker") == 1
        address = f" --url {server.grpc} --timeout-s {PATIENT_S}"
        assert run(shell.strip() + address, tmp_path).count("scores") == 1
        printed = run(f"{bench.strip()}{address} --seconds 0.4 --repeats 1 --warm-up 0", tmp_path)
        assert "all right" in printed
        assert metric(server, "tbe_user_side_total", model="ranker") > 2
