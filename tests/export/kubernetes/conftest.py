"""A router and its hosts, and one model, published and not deployed."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from export import Sharding
from export.kubernetes.options import ManifestOptions
from tests.support.commands import tbe_export
from tests.support.servers import tbe_serve

IMAGE = f"registry.example/tbe-serving@sha256:{'0123456789abcdef' * 4}"
OPTIONS = ManifestOptions(image=IMAGE, claim="models")
TYPES = {"genre": "data_parallel", "item": "table_row_wise", "word": "table_row_wise", "user": "row_wise"}


@pytest.fixture(scope="package")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with versions 1 and 2 of the router Movies_V2, of hosts 0 and 1, and with the model `m`."""
    from export import export_model
    from tests.support.models import MIXED, MIXED_CONFIG, SUM, collection

    repository = tmp_path_factory.mktemp("published") / "repository"
    sharding = Sharding(ranks=4, ranks_per_host=2, types=TYPES, hosts_as_models=True)
    for seed in (1, 2):
        export_model(collection(MIXED, seed=seed), repository, "Movies_V2", replace(MIXED_CONFIG, sharding=sharding))
    export_model(collection(SUM), repository, "m")
    return repository


@pytest.fixture
def repository(published: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to change."""
    return Path(shutil.copytree(published, tmp_path / "repository"))


@pytest.fixture
def configured(repository: Path) -> Path:
    """The router's model, whose settings name the hosts as manifests do: set by the command that a person is shown."""
    model = repository / "Movies_V2"
    refused = tbe_export("manifests", str(model), *options_for(repository.parent / "k8s"))
    assert refused.exit_code == 1
    command = refused.stderr.rpartition("Run this first: tbe-serve ")[2].split()
    assert tbe_serve(*command).returncode == 0
    return model


def options_for(out: Path, *more: str) -> list[str]:
    """The options of `tbe-export manifests`."""
    return ["--out", str(out), "--image", IMAGE, "--claim", "models", *more]
