"""A router and the hosts of its plan, run from generated manifests by podman. `make kube` runs this."""

import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import trustme

from export import Sharding, export_model
from serving.client import LookupClient, Retries, Tls
from serving.engine import Engine
from serving.errors import ServerUnavailable
from serving.model.settings import ServingSettings
from tests.support.commands import tbe_export
from tests.support.models import MIXED, MIXED_CONFIG, collection
from tests.support.pods import FOLDER, Pod, Volumes, image, pods
from tests.support.servers import tbe_serve

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

# genre is the router's own; the rows of user are on both hosts.
TYPES = {"genre": "data_parallel", "item": "table_row_wise", "word": "table_row_wise", "user": "row_wise"}
FEATURES = {
    "user_id": [[1, 2], [499], []],
    "item_id": [[1], [2, 299], [5]],
    "recent_items": [[1, 2, 3], [], [4]],
    "genres": [[1], [], [2, 19]],
    "words": [[999, 0], [1], [2]],
}


@dataclass(frozen=True)
class Fleet:
    pods: dict[str, list[Pod]]
    client: LookupClient
    expected: Engine

    @property
    def every(self) -> list[Pod]:
        return [pod for replicas in self.pods.values() for pod in replicas]

    @property
    def router(self) -> Pod:
        (router,) = self.pods["movies"]
        return router

    def check(self, *features: str) -> None:
        """Look up, and compare with the same plan in one process, bit for bit."""
        features_of_request = {name: FEATURES[name] for name in features or FEATURES}
        answer, expected = self.client.lookup(features_of_request), self.expected.lookup(features_of_request)
        for name in features_of_request:
            np.testing.assert_array_equal(answer[name], expected[name])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / "key.pem"], check=True)
    (folder / "public").mkdir()
    public = folder / "public" / "trusted.pem"
    subprocess.run(["openssl", "pkey", "-in", folder / "key.pem", "-pubout", "-out", public], check=True)
    return folder


@pytest.fixture(scope="module")
def base(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository of signed bundles, `repository`, and the manifests, `k8s`."""
    folder = tmp_path_factory.mktemp("fleet")
    sharding = Sharding(ranks=4, ranks_per_host=2, types=TYPES, hosts_as_models=True)
    # A busy machine takes longer than the default to reach the server that replaces a host's.
    serving = ServingSettings(shard_timeout_ms=2_000)
    config = replace(MIXED_CONFIG, sharding=sharding, serving=serving)
    bundle = export_model(collection(MIXED), folder / "repository", "movies", config, signing_key=keys / "key.pem")
    arguments = [
        *("manifests", str(bundle.parent), "--out", str(folder / "k8s"), "--image", image(), "--claim", "models"),
        *("--copy", "--trusted-keys", str(keys / "public" / "trusted.pem")),
    ]
    refused = tbe_export(*arguments)
    assert refused.exit_code == 1
    configure = refused.stderr.rpartition("Run this first: tbe-serve ")[2].replace("KEY.pem", str(keys / "key.pem"))
    assert tbe_serve(*configure.split()).returncode == 0
    written = tbe_export(*arguments)
    assert written.exit_code == 0, written.stderr
    return folder


# Whose certificates one authority signs: those for what clients call, and those for hosts and who calls them.
AUTHORITIES = ({"movies-tls": "movies"}, {"movies-hosts-tls": "movies-hosts", "movies-hosts-client-tls": "r"})


@dataclass(frozen=True)
class Secrets:
    """Folders as Secrets are mounted, by their names."""

    folder: Path
    authorities: list[trustme.CA]

    def issue(self) -> None:
        """Write certificates of these authorities, anew if there are some."""
        for authority, names in zip(self.authorities, AUTHORITIES, strict=True):
            for name, identity in names.items():
                issued = authority.issue_cert(identity)
                (self.folder / name).mkdir(exist_ok=True)
                authority.cert_pem.write_to_path(self.folder / name / "ca.crt")
                issued.cert_chain_pems[0].write_to_path(self.folder / name / "tls.crt")
                issued.private_key_pem.write_to_path(self.folder / name / "tls.key")
        open_to_pods(self.folder)

    def is_served(self, pod: Pod) -> bool:
        """Whether a pod serves the certificate that is there."""
        name = "movies-tls" if pod.name.startswith("movies-0") else "movies-hosts-tls"
        return ssl.get_server_certificate((pod.address, 8001)) == (self.folder / name / "tls.crt").read_text()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    new_secrets = Secrets(tmp_path_factory.mktemp("tls"), [trustme.CA() for _ in AUTHORITIES])
    new_secrets.issue()
    return new_secrets


@pytest.fixture(scope="module")
def tls(secrets: Secrets) -> Path:
    return secrets.folder


@pytest.fixture(scope="module")
def fleet(base: Path, keys: Path, tls: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas of host 0, one of host 1, and a router: all ready."""
    mounted = {path.name: path for path in tls.iterdir()} | {"movies-trusted-keys": keys / "public"}
    volumes = Volumes({"models": base / "repository"}, mounted)
    open_to_pods(base, keys)
    sharding = Sharding(ranks=4, ranks_per_host=2, types=TYPES)
    one_process = replace(MIXED_CONFIG, sharding=sharding)
    expected = Engine.open(export_model(collection(MIXED), tmp_path_factory.mktemp("one") / "r", "m", one_process))
    playing = tmp_path_factory.mktemp("playing")
    roots = Tls(root_certificates=tls / "movies-tls" / "ca.crt", server_name="movies")
    with pods(base / "k8s", {"movies-host-0": 2}, volumes, playing) as every:
        (router,) = every["movies"]
        hosts = [pod for replicas in every.values() for pod in replicas if pod != router]
        for pod in hosts:
            pod.play()
        for pod in hosts:
            pod.wait_until_ready()
        router.play()
        router.wait_until_ready()
        with LookupClient(f"{router.address}:8001", "movies", 5, tls=roots, retries=Retries(attempts=1)) as client:
            yield Fleet(every, client, expected)


def open_to_pods(*folders: Path) -> None:
    """Let user 1000 read what pods mount, and pass through the folders above."""
    for folder in folders:
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        for parent in folder.parents:
            if parent.owner() == "root" and parent != Path("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o011)


def is_alive(pod: Pod) -> bool:
    return pod.probe("livenessProbe") == 200


def test_the_fleet_answers_like_the_same_plan_in_one_process(fleet: Fleet) -> None:
    for pod in fleet.every:
        assert is_alive(pod), pod.name
    for _ in range(10):
        fleet.check()


def test_the_fleet_answers_without_one_of_two_replicas(fleet: Fleet) -> None:
    first, second = fleet.pods["movies-host-0"]
    first.kill()
    fleet.check()
    assert fleet.router.is_ready()
    assert second.is_ready()


def test_the_router_names_a_host_without_replicas_and_keeps_serving(fleet: Fleet) -> None:
    """It stays ready for what the host does not hold, and alive, so that nobody restarts it."""
    (only,) = fleet.pods["movies-host-1"]
    only.kill()
    with pytest.raises(ServerUnavailable, match=r"host 1 \(movies-host-1 version 1 at dns:///movies-host-1:8001\)"):
        fleet.client.lookup({"user_id": [[499]]})  # a row of the last host
    fleet.check("genres")  # the router's own rows
    assert fleet.router.is_ready()
    assert is_alive(fleet.router)
    only.play()
    only.wait_until_ready()
    deadline = time.monotonic() + 60
    while True:  # until the router has found it
        try:
            fleet.check()
            break
        except ServerUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_a_host_refuses_a_client_without_a_certificate(fleet: Fleet, tls: Path) -> None:
    """Hosts ask for a certificate, which a router's pod has, and clients have not."""
    _, host = fleet.pods["movies-host-0"]
    strange = Tls(root_certificates=tls / "movies-hosts-tls" / "ca.crt", server_name="movies-hosts")
    with (
        LookupClient(f"{host.address}:8001", "movies-host-0", 5, tls=strange, retries=Retries(attempts=1)) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.info()


def test_renewed_secrets_are_served_by_every_pod_without_a_failed_call(fleet: Fleet, secrets: Secrets) -> None:
    living = [pod for pod in fleet.every if pod != fleet.pods["movies-host-0"][0]]
    assert all(secrets.is_served(pod) for pod in living)
    secrets.issue()
    assert not any(secrets.is_served(pod) for pod in living)
    deadline = time.monotonic() + 90
    while not all(secrets.is_served(pod) for pod in living):
        assert time.monotonic() < deadline
        fleet.check()
    for _ in range(50):
        fleet.check()
    assert all(pod.is_ready() for pod in living)


def test_a_pod_has_its_own_model_alone(fleet: Fleet) -> None:
    _, host = fleet.pods["movies-host-0"]
    assert sorted(host.files("/repository")) == ["movies-host-0"]
    assert sorted(host.files("/repository/movies-host-0")) == ["1", "config.pbtxt", "config.sig"]


def test_checkov_finds_only_the_expected_deviations(base: Path) -> None:
    """The namespace is the overlay's. The image's user is 1000. Cores have no limit, for that makes answers late."""
    meant = {"CKV_K8S_21", "CKV_K8S_40", "CKV_K8S_11"}
    program = str(FOLDER / "checkov" / "bin" / "checkov")
    words = ["--directory", str(base / "k8s"), "--framework", "kubernetes", "--compact", "--quiet", "--output", "cli"]
    done = subprocess.run(
        [program, *words, "--skip-check", ",".join(sorted(meant))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
