"""Models with and without scores, and a server of them, for the commands that score."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.server import Ports, Server, run_server


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the models `ranker`, `of_ids`, `mixing` and, without scores, `without`."""
    from export import ExportConfig, export_model
    from tests.support.models import SUM, collection
    from tests.support.ranker import mixing, ranker, ranker_of_ids

    path = tmp_path_factory.mktemp("scored") / "repository"
    for name, module in (("ranker", ranker()), ("of_ids", ranker_of_ids()), ("mixing", mixing())):
        export_model(module, path, name, ExportConfig(scores=True))
    export_model(collection(SUM), path, "without")
    return path


@pytest.fixture(scope="session")
def score_server(scored: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with run_server(scored, Ports(grpc=0, http=0, operations=0), log=log) as running:
        yield running
