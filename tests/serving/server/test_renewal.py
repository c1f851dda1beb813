"""Certificates that are renewed while a server serves: another process takes its place, and no call fails."""

import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from tritonclient.grpc.service_pb2 import ModelReadyRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from export import WeightDtype, export_model
from export.publish.published import release
from serving.client import LookupClient, Tls
from serving.errors import ServingError
from serving.tables.mutable_tables import LIVE_PREFIX
from tests.support.certificates import write_certificates
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.mutable_tables import publish_number, published
from tests.support.server_waits import PATIENCE_S, listening, stopped, wait_until
from tests.support.servers import Running, page, running, tbe_serve, tritonservers_of

ASKED = {"x": [[1]]}
# Of each client between two calls: the servers have the same cores.
PAUSE_S = 0.02
# In place of five minutes.
AGE = ("--", "--grpc-max-connection-age=1500")


@dataclass
class Pems:
    """Certificates that are served, and those of others that may take their place, each by an authority of its own."""

    folder: Path
    roots: Path
    authorities: dict[str, Path]

    @property
    def tls(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.folder / "server.pem"), "--tls-key", str(self.folder / "server.key"))

    def renew(self, name: str) -> None:
        """One file after the other, as tools do: for a moment they do not fit."""
        for file in ("server.pem", "server.key"):
            shutil.copyfile(self.authorities[name] / file, self.folder / file)
            time.sleep(0.3)

    def url(self, server: Running) -> str:
        """At the address that the certificates are for."""
        return f"127.0.0.1:{server.grpc.rpartition(':')[2]}"

    def are_served(self, server: Running, name: str) -> bool:
        return served(self.url(server)) == (self.authorities[name] / "server.pem").read_text()


def served(address: str) -> str:
    """The certificate of a server. Nothing while there is none: who comes is turned away at once."""
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    try:
        return ssl.get_server_certificate((host, int(port)), timeout=PATIENCE_S)
    except ConnectionError:
        assert time.monotonic() - began < PATIENCE_S / 2
        return ""


@pytest.fixture
def pems(tmp_path: Path) -> Pems:
    authorities = {
        name: write_certificates(tmp_path / name, server="127.0.0.1") for name in ("first", "second", "third")
    }
    roots = tmp_path / "roots.pem"
    roots.write_bytes(b"".join((authority / "root.pem").read_bytes() for authority in authorities.values()))
    return Pems(Path(shutil.copytree(authorities["first"], tmp_path / "served")), roots, authorities)


@dataclass
class Asked:
    """What clients were told: by our client, by a plain one on a lasting connection, and on a new one each time."""

    answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("ours", "lasting", "new"), 0))
    failed: list[str] = field(default_factory=list)


@contextmanager
def asking(address: str, roots: Path) -> Iterator[Asked]:
    """Ask all the time. Plain clients do not ask again, but for what gRPC knows that no server has begun."""
    ended, results = threading.Event(), Asked()
    credentials = grpc.ssl_channel_credentials(roots.read_bytes())
    alone = [("grpc.use_local_subchannel_pool", 1)]

    def ours() -> None:
        with LookupClient(address, "m", 60, tls=Tls(root_certificates=roots)) as client:
            while not ended.is_set():
                try:
                    client.lookup(ASKED)
                    results.answers["ours"] += 1
                except ServingError as error:
                    results.failed.append(f"ours: {error}")
                time.sleep(PAUSE_S)

    def plain(name: str, calls: int) -> None:
        while not ended.is_set():
            with grpc.secure_channel(address, credentials, options=alone) as channel:
                stub = GRPCInferenceServiceStub(channel)
                while not ended.is_set() and calls:
                    try:
                        assert stub.ModelReady(ModelReadyRequest(name="m")).ready
                        results.answers[name] += 1
                    except (grpc.RpcError, AssertionError) as error:
                        results.failed.append(f"{name}: {error!r}")
                    time.sleep(PAUSE_S)
                    if calls == 1:
                        break

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(ours), pool.submit(plain, "lasting", -1), pool.submit(plain, "new", 1)]
        try:
            yield results
        finally:
            ended.set()
        for thread in threads:
            thread.result()


def processes(server: Running) -> set[int]:
    """Those of tritonserver."""
    return {process.pid for process in tritonservers_of(server.process)}


def is_over(server: Running, pems: Pems, name: str, before: set[int]) -> bool:
    """Whether a server has gone over to certificates, and the process that served those before has ended."""
    pids = processes(server)
    return pems.are_served(server, name) and len(pids) == 1 and not pids & before


def restarts(server: Running) -> int:
    (line,) = [line for line in page(server, "/metrics").splitlines() if line.startswith("tbe_restarts_total ")]
    return int(line.split()[1])


@pytest.mark.promise("TLS certificates and authorities are renewed under load without a failed call")
@pytest.mark.parametrize(
    ("host", "names"),
    one_in(2, [("127.0.0.1", ["second"]), ("0.0.0.0", ["second", "third", "first", "second"])]),
)
def test_renewed_certificates_are_served_without_a_failed_call(
    repository: Path, pems: Pems, host: str, names: list[str]
) -> None:
    """And the server goes on to be switched and mended as before."""
    with (
        running(repository, "--host", host, *pems.tls, *AGE) as server,
        asking(pems.url(server), pems.roots) as results,
    ):
        for name in names:
            before = processes(server)
            pems.renew(name)
            wait_until(partial(is_over, server, pems, name, before), f"{name} is not served")
            results.answers = dict.fromkeys(results.answers, 0)
            wait_until(lambda: min(results.answers.values()) > 5, "no answers")
        assert results.failed == []
        assert page(server, "/readyz?verbose") == "ready\n"
        assert restarts(server) == 0
        export_model(collection(SUM), repository, "m")
        assert tbe_serve("load", "m", "--url", pems.url(server)).stdout == "m: version 1 → 2\n"
        assert results.failed == []
        assert {host for host, _ in listening(server.triton)} == {host if host == "0.0.0.0" else f"::ffff:{host}"}
        server.triton.kill()
        wait_until(lambda: restarts(server) == 1, "it is not started anew")
        wait_until(lambda: pems.are_served(server, names[-1]), "the port is led elsewhere")


@pytest.mark.promise("TLS certificates and authorities are renewed under load without a failed call")
@pytest.mark.long
@pytest.mark.parametrize(("by", "wait_s"), [("load", 0.3), ("release", 0.8), ("load", 1.3), ("release", 1.8)])
def test_models_loaded_during_a_renewal_are_served(repository: Path, pems: Pems, by: str, wait_s: float) -> None:
    """No answer on a new connection is of an older version than one before, and a version that is named answers."""
    export_model(collection(SUM), repository, "m")
    release(repository / "m", [1])
    options = ["--follow"] if by == "release" else ["--serve", "m=1"]
    with running(repository, *options, *pems.tls, *AGE) as server:
        before = processes(server)
        pems.renew("second")
        wait_until(lambda: len(processes(server)) == 2, "no second process")
        time.sleep(wait_s)
        if by == "release":
            release(repository / "m", [2])
        else:
            assert tbe_serve("load", "m", "--version", "2", "--url", server.grpc).stdout == "m: version 1 → 2\n"
        versions, until = [1], time.monotonic() + PATIENCE_S
        while versions[-1] == 1 or not is_over(server, pems, "second", before):
            assert time.monotonic() < until
            with LookupClient(server.grpc, "m", 60, tls=Tls(root_certificates=pems.roots)) as client:
                versions.append(client.lookup(ASKED).version)
            credentials = grpc.ssl_channel_credentials(pems.roots.read_bytes())
            with grpc.secure_channel(server.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                named = GRPCInferenceServiceStub(channel).ModelReady(ModelReadyRequest(name="m", version="2"))
                assert named.ready or versions[-1] == 1
            time.sleep(PAUSE_S)
        assert versions == sorted(versions)
        code, said = stopped(server)
        assert code == 0
        assert "renewal_failed" not in said
        assert "release_failed" not in said


@pytest.mark.long
def test_rows_stay_fresh_during_a_renewal(tmp_path: Path, pems: Pems) -> None:
    """Both have one copy of the tables, to which deltas are applied."""
    bundle = published(tmp_path, 100, 16, WeightDtype.FP32)
    with (
        running(tmp_path / "r", *pems.tls, *AGE) as server,
        LookupClient(server.grpc, "m", 60, tls=Tls(root_certificates=pems.roots)) as client,
    ):
        before = processes(server)
        pems.renew("second")
        number, answers, until = 0, [0.0], time.monotonic() + PATIENCE_S
        while len(answers) < 3 or not is_over(server, pems, "second", before):
            assert time.monotonic() < until
            number += 1
            publish_number(bundle, number, [3], 16)
            answers += [client.lookup({"x": [[3]]})["x"][0, 0].item() for _ in range(20)]
        assert (
            len([*Path("/dev/shm").glob(f"{LIVE_PREFIX}{server.process.pid}-*")]) <= 1
        )  # none: there are huge pages
        wait_until(lambda: client.lookup({"x": [[3]]})["x"][0].tolist() == [number] * 16, "the last delta is missing")
    first = [value in range(1, number + 1) for value in answers].index(
        True
    )  # before, they are the rows that were exported
    assert answers[first:] == sorted(answers[first:])
    assert len(set(answers[first:])) > 5


@pytest.mark.long
@pytest.mark.parametrize("killed", ["the present", "the second", "the new"])
def test_a_process_that_dies_during_a_renewal_is_restarted(repository: Path, pems: Pems, killed: str) -> None:
    with running(repository, *pems.tls, *AGE) as server:
        (present,) = processes(server)
        with LookupClient(server.grpc, "m", 60, tls=Tls(root_certificates=pems.roots)) as client:
            client.lookup(ASKED)
            pems.renew("second")
            wait_until(lambda: len(processes(server)) == 2, "no second process")
            (second,) = processes(server) - {present}
            if killed == "the new":
                wait_until(lambda: pems.are_served(server, "second"), "second is not served")
            psutil.Process(present if killed == "the present" else second).kill()
            if killed == "the second":
                wait_until(lambda: processes(server) == {present}, "it is there")
            else:
                wait_until(lambda: pems.are_served(server, "second"), "it is not back")
            wait_until(lambda: answers(client), "no answer")
        code, said = stopped(server)
        assert code == 0, said
        assert ("cannot switch to the renewed certificates" in said) == (killed == "the second")
        assert not any(psutil.pid_exists(pid) for pid in (present, second))


def answers(client: LookupClient) -> bool:
    try:
        client.lookup(ASKED)
    except ServingError:
        return False
    return True


@pytest.mark.long
def test_invalid_certificates_leave_the_present_process(repository: Path, pems: Pems) -> None:
    """Half of a pair, no certificate, an expired one, a repository that is gone: the log says why."""
    with running(repository, *pems.tls, *AGE) as server:
        (present,) = processes(server)
        (pems.folder / "server.key").write_bytes((pems.authorities["second"] / "server.key").read_bytes())
        time.sleep(5)
        (pems.folder / "server.pem").write_text("no certificate")
        time.sleep(14)
        expired = write_certificates(
            pems.folder.parent / "expired", expires=datetime.now(UTC) - timedelta(hours=1), server="127.0.0.1"
        )
        for file in ("server.pem", "server.key"):
            shutil.copyfile(expired / file, pems.folder / file)
        time.sleep(14)
        assert processes(server) == {present}
        (repository / "m").rename(repository / "gone")
        pems.renew("third")
        wait_until(lambda: len(processes(server)) == 2, "no second process")
        wait_until(lambda: processes(server) == {present}, "the second has not ended")
        assert pems.are_served(server, "first")
        code, said = stopped(server)
        assert code == 0
        before = "cannot switch to the renewed certificates, and keeps the previous ones"
        assert said.count(f"{before}: --tls-cert, --tls-key: {pems.folder / 'server.pem'}: expected") == 1
        assert said.count(f"{before}: {pems.folder / 'server.pem'}: is not valid now: a certificate is from") == 1
        assert f"{before}: failed to load 'm'" in said


@pytest.mark.long
def test_a_server_stops_during_a_renewal(repository: Path, pems: Pems) -> None:
    with running(repository, *pems.tls) as server:
        pems.renew("second")
        wait_until(lambda: len(processes(server)) == 2, "no second process")
        wait_until(lambda: pems.are_served(server, "second"), "second is not served")
        both = processes(server)
        assert len(both) == 2  # nobody waits for five minutes
        code, said = stopped(server)
    assert code == 0, said
    assert not any(psutil.pid_exists(pid) for pid in both)
