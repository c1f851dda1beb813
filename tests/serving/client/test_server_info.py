"""What servers of a fleet say that they serve, and where they differ."""

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from serving.client import Retries, Tls
from serving.client.connection import Connection
from serving.client.server_info import ServerInfo, differences, query_servers
from serving.server import Access, ServerTls, run_server
from tests.support.certificates import write_certificates
from tests.support.fake_server import FakeServer, serving
from tests.support.servers import FREE


class Dying(FakeServer):
    """Two versions are loaded; the process of one has died, which newer releases of Triton notice."""

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append((request, dict(context.invocation_metadata()), 0.0))
        return pb.ServerMetadataResponse(name="triton", version="2.68.0")

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        response = pb.ModelStatisticsResponse()
        for version in ("10", "9"):
            response.model_stats.add(name="m", version=version)
        return response

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        return pb.ModelReadyResponse(ready=request.version == "9")


def test_servers_are_queried_over_tls_and_a_dead_one_is_named(one_model: Path, tmp_path: Path) -> None:
    pems = write_certificates(tmp_path, server="lookup.test", client="client.test")
    secured = ServerTls(
        certificate=pems / "server.pem", private_key=pems / "server.key", client_root=pems / "root.pem"
    )
    tls = Tls(
        root_certificates=pems / "root.pem",
        certificate_chain=pems / "client.pem",
        private_key=pems / "client.key",
        server_name="lookup.test",
    )
    with run_server(one_model, FREE, access=Access(tls=secured), log=tmp_path / "log") as server:
        addresses = (server.grpc, "127.0.0.1:1")
        connection = Connection(addresses=addresses, timeout_s=5, retries=Retries(attempts=1), tls=tls)
        there, missing = query_servers(connection)
        assert there == ServerInfo(address=server.grpc, triton="2.51.0", models={"m": (1,)}, problem=None)
        assert (missing.address, missing.models) == ("127.0.0.1:1", {})
        assert "Connection refused" in str(missing.problem)
        (refused,) = query_servers(Connection(addresses=[server.grpc], timeout_s=5, retries=Retries(attempts=1)))
        assert refused.problem is not None


def test_unready_models_are_not_listed_as_served() -> None:
    fake = Dying()
    with serving(fake) as address:
        (info,) = query_servers(Connection(addresses=[address], timeout_s=60, metadata={"authorization": "Bearer t"}))
    assert info == ServerInfo(address=address, triton="2.68.0", models={"m": (9,)}, problem=None)
    assert fake.calls[0][1]["authorization"] == "Bearer t"


def serves(address: str, **models: tuple[int, ...]) -> ServerInfo:
    return ServerInfo(address=address, triton="2.51.0", models=models, problem=None)


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([serves("a", m=(7,)), serves("b", m=(7,))], []),
        ([serves("a", m=(7,)), serves("b", m_host_0=(7,))], []),
        ([serves("a", m=(7,)), serves("b", m=(6, 7)), serves("c", m=(7,))], ["m: versions differ: 6, 7 on b; 7 on a, c"]),
        ([serves("a", m=(7,)), serves("b")], ["b: serves nothing"]),
        ([ServerInfo(address="a", triton=None, models={}, problem="gone")], ["a: does not answer: gone"]),
    ],
    ids=["equal", "different models", "different versions", "nothing", "gone"],
)  # fmt: skip
def test_differences_are_named(servers: list[ServerInfo], expected: list[str]) -> None:
    assert list(differences(tuple(servers))) == expected
