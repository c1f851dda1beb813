"""A repository that somebody may write to."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.attackers import Target
    from tests.support.s3 import S3


@pytest.fixture(scope="session")
def signed_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem, trusted.pem and the repository r."""
    from export import export_model
    from tests.support.attackers import EXACT
    from tests.support.models import SUM, collection

    folder = tmp_path_factory.mktemp("signed")
    key = folder / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", folder / "trusted.pem"], check=True)
    for model, seed in (("m", 1), ("m", 2), ("other", 3)):
        export_model(collection(SUM, seed=seed), folder / "r", model, EXACT, signing_key=key)
    return folder


@pytest.fixture
def target(signed_repository: Path, tmp_path: Path) -> "Iterator[Target]":
    from tests.support.attackers import Target

    shutil.copytree(signed_repository, tmp_path, dirs_exist_ok=True)
    mark = tmp_path / "somebody else's code ran"
    yield Target(tmp_path / "r", tmp_path / "trusted.pem", tmp_path / "key.pem", mark)
    assert not mark.exists(), mark.read_text()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[S3]":
    """An S3 server with an empty bucket, in which tests take prefixes of their own."""
    from tests.support.s3 import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
