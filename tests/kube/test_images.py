"""The images of deploy/, built and run: they serve, export and ask as their users do. `make kube` runs this."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from export import export_model
from serving.client import LookupClient, Tls
from serving.engine import Engine
from tests.support.certificates import write_certificates
from tests.support.models import MIXED, MIXED_CONFIG, collection, random_bags
from tests.support.pods import IMAGE, podman

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

# As the Dockerfiles say that they are run.
LOCKED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
HERE = ("--network", "host")
PATIENCE_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all may read, with a repository and certificates."""
    folder = tmp_path_factory.mktemp("images")
    export_model(collection(MIXED), folder / "repository", "movies", MIXED_CONFIG)
    write_certificates(folder / "tls", server="127.0.0.1")
    for name in ("pem", "key"):
        shutil.copy(folder / "tls" / f"server.{name}", folder / "tls" / f"tls.{'crt' if name == 'pem' else name}")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def mounts(folder: Path) -> tuple[str, ...]:
    return tuple(part for name in ("repository", "tls") for part in ("--volume", f"{folder / name}:/{name}:ro"))


@contextmanager
def served(tag: str, folder: Path) -> Iterator[str]:
    """A server of an image, in the network of this process; the container's name."""
    name = f"tbe-image-{tag}"
    podman("run", "--detach", "--name", name, "--shm-size", "1g", *LOCKED, *HERE, *mounts(folder), f"{IMAGE}:{tag}")
    try:
        yield name
    finally:
        podman("rm", "--force", "--time", "20", name)


def wait_until_healthy(name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while podman("healthcheck", "run", name, check=False).returncode:
        done = podman("logs", name, check=False)
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.5)


@pytest.mark.parametrize("tag", ["kube", "triton"])
def test_an_image_serves_and_that_of_the_client_asks_it(folder: Path, tag: str) -> None:
    """`triton` is of deploy/Dockerfile, on a Debian that is laid out as Triton's image is."""
    if podman("image", "exists", f"{IMAGE}:{tag}", check=False).returncode:
        pytest.skip("it was not built: requirements/kube.sh says why")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    expected = Engine.open(folder / "repository" / "movies" / "1")
    bags = dict(random_bags(np.random.default_rng(0), MIXED, 20))
    with served(tag, folder) as name:
        wait_until_healthy(name)
        with LookupClient(
            "127.0.0.1:8001", "movies", 60, tls=Tls(root_certificates=folder / "tls" / "root.pem")
        ) as client:
            answer = client.lookup(bags)
            for feature, rows in expected.lookup(bags).items():
                np.testing.assert_array_equal(answer[feature], rows)
        arguments = ("movies", "--url", "127.0.0.1:8001", "--tls-ca", "/tls/root.pem")
        client_of = ("run", "--rm", "--interactive", *LOCKED, *HERE, *mounts(folder), f"{IMAGE}:client")
        assert podman(*client_of, "health", *arguments).stdout == "movies: version 1 answers\n"
        assert podman("exec", name, "id", "-u").stdout == "1000\n"
        assert podman("exec", name, "touch", "/opt/x", check=False).returncode != 0
        podman("stop", "--time", "30", name)
        state = json.loads(podman("inspect", name).stdout)[0]["State"]
        assert state["ExitCode"] == 0, podman("logs", name).stderr


def test_the_image_of_exports_verifies_what_is_published(folder: Path) -> None:
    run = ("run", "--rm", *LOCKED, "--network", "none", *mounts(folder), f"{IMAGE}:export")
    done = podman(*run, "verify", "/repository/movies")
    assert "match their digests" in done.stdout
    damaged = folder / "damaged"
    shutil.copytree(folder / "repository", damaged / "repository")
    weights = next((damaged / "repository" / "movies" / "1").glob("weights.*.bin"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    refused = podman(
        "run", "--rm", *LOCKED, "--volume", f"{damaged / 'repository'}:/repository:ro", f"{IMAGE}:export",
        "verify", "/repository/movies", check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert weights.name in refused.stderr


@pytest.mark.parametrize(
    ("tag", "lacks"),
    [
        ("kube", {"pytest", "torchrec", "hypothesis", "mypy"}),
        ("export", {"pytest", "tritonserver", "pytriton", "hypothesis", "mypy"}),
        ("client", {"pytest", "torch", "fbgemm_gpu", "pytriton", "torchrec"}),
    ],
)
def test_an_image_has_nothing_that_it_does_not_need(tag: str, lacks: set[str]) -> None:
    program = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"
    run = ("run", "--rm", "--network", "none", "--entrypoint", "python3", f"{IMAGE}:{tag}")
    assert podman(*run, "-c", program, *sorted(lacks)).stdout == "[]\n"
    for name in ("node", "gcc", "git"):
        assert podman(*run, "-c", f"import shutil; print(shutil.which({name!r}))").stdout == "None\n"
