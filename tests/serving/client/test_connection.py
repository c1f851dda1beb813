"""Where a client connects: one server or several, for how long, and what cannot be used."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from serving.client import Answer, AsyncLookupClient, LookupClient, Retries, Tls, retries
from serving.errors import (
    ConfigurationError,
    RequestCancelled,
    ServerUnavailable,
)
from tests.support.fake_server import FakeServer, serving
from tests.support.lookups import Lookup


@pytest.mark.parametrize("kind", [LookupClient, AsyncLookupClient])
def test_a_silent_server_leaves_time_for_another(
    kind: type[LookupClient | AsyncLookupClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of it: more than by default, since the machine may be busy. Both servers are connected before,
    since gRPC chooses anew who is next when a connection is made."""
    monkeypatch.setattr(retries, "_NOTICED_S", 60.0)
    monkeypatch.setattr(retries, "_FIRST_SHARE", 1 / 4)
    silent, other = FakeServer(), FakeServer()
    released = threading.Event()

    def say_nothing(_: Any) -> None:
        released.wait(60)

    async def ask(client: LookupClient | AsyncLookupClient) -> None:
        answer = client.lookup({"x": [[1]]})
        await (answer if isinstance(answer, Awaitable) else asyncio.sleep(0))

    async def run(addresses: list[str]) -> None:
        client = kind(addresses, "m", 20)
        for _ in range(200):
            if silent.calls and other.calls:
                break
            await ask(client)
        silent.fail = say_nothing
        before = len(silent.calls), len(other.calls)
        for _ in range(2):  # the turn of each comes
            await ask(client)
        assert len(silent.calls) > before[0]
        assert len(other.calls) == before[1] + 2
        released.set()
        await (client.close() or asyncio.sleep(0))

    with serving(silent) as first, serving(other) as second:
        try:
            asyncio.run(run([first, second]))
        finally:
            released.set()


async def _far_away(address: str, one_way_s: float, listens: "Future[tuple[int, Callable[[], object]]]") -> None:
    """Pass on to a server all that comes, and back, each piece so many seconds later: the port, and how it is ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            loop.call_later(one_way_s, writer.write, piece)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, to_server), pass_on(from_server, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    listens.set_result((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(ended.set)))
    await ended.wait()
    server.close()


def test_a_server_far_away_is_connected_to_at_the_first_try(fake: FakeServer, address: str) -> None:
    """Half a second there and back, and the server's first word has to come."""
    listens: Future[tuple[int, Callable[[], object]]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_far_away(address, 0.25, listens)))
    thread.start()
    port, end = listens.result(20)
    try:
        with LookupClient(f"127.0.0.1:{port}", "m", 20, retries=Retries(attempts=1)) as client:
            assert client.lookup({"x": [[1]]}).version == 7
    finally:
        end()
        thread.join()
    assert fake.calls


@pytest.mark.long
def test_a_long_call_and_a_pause_keep_their_connection(fake: FakeServer, address: str) -> None:
    """A server that asks for nothing special (gRPC's defaults, Triton's too) ends connections that ping too often."""
    peers: list[str] = []

    def fail(context: Any) -> None:
        peers.append(context.peer())
        time.sleep(10 if len(peers) == 1 else 0)

    fake.fail = fail
    with LookupClient(address, "m", timeout_s=30, retries=Retries(attempts=1)) as client:
        client.lookup({"x": [[1]]})
        time.sleep(4)
        client.lookup({"x": [[1]]})
    assert len(peers) == 2
    assert len(set(peers)) == 1


def test_several_addresses_take_turns(lookup: Lookup) -> None:
    one, other = FakeServer(), FakeServer()
    with serving(one) as first, serving(other) as second:
        with LookupClient([first, second], "m", 20) as client:
            client.lookup({"x": [[1]]})
            deadline = 200  # both have to be connected before turns are taken
            while not (one.calls and other.calls) and deadline:
                client.lookup({"x": [[1]]})
                deadline -= 1
            before = len(one.calls), len(other.calls)
            for _ in range(10):
                client.lookup({"x": [[1]]})
        assert (len(one.calls) - before[0], len(other.calls) - before[1]) == (5, 5)
        assert lookup([first, second])["x"].shape == (2, 2)


def test_a_dead_server_is_skipped() -> None:
    fake = FakeServer()
    with serving(fake) as address, LookupClient(["127.0.0.1:1", address], "m", 20) as client:
        for _ in range(10):
            client.lookup({"x": [[1]]})
    assert len(fake.calls) == 10


def test_concurrent_calls_share_one_channel(fake: FakeServer, address: str) -> None:
    async def run() -> list[Answer]:
        async with AsyncLookupClient(address, "m", 20) as client:
            return await asyncio.gather(*(client.lookup({"x": [[number]] * number}) for number in range(1, 50)))

    answers = asyncio.run(run())
    assert [len(answer["x"]) for answer in answers] == list(range(1, 50))
    assert len({metadata["user-agent"] for _, metadata, _ in fake.calls}) == 1


def test_a_closed_client_says_so(address: str) -> None:
    client = LookupClient(address, "m", 60)
    client.close()
    client.close()
    with pytest.raises(RequestCancelled, match="the client is closed"):
        client.lookup({"x": [[1]]})

    async def run() -> None:
        client = AsyncLookupClient(address, "m", 60)
        await client.close()
        await client.close()
        with pytest.raises(RequestCancelled, match="the client is closed"):
            await client.lookup({"x": [[1]]})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"timeout_s": 0}, "timeout_s: expected > 0 and at most 1000000, got 0", id="no time"),
        pytest.param({"addresses": []}, "addresses: expected at least one, got none", id="no address"),
        pytest.param({"addresses": ["a:1", "b:1"], "tls": Tls()}, r"a:1, b:1: expected Tls\(server_name=…\), the one name", id="several names"),
        pytest.param({"tls": Tls(private_key=Path("nowhere"))}, "expected certificate_chain and private_key together", id="half a certificate"),
        pytest.param({"tls": Tls(root_certificates=Path("/nowhere.pem"))}, r"/nowhere.pem: cannot be read: ", id="no root"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LookupClient(**({"addresses": "127.0.0.1:1", "model": "m"} | arguments))


def test_an_unresolvable_address_among_several_is_refused() -> None:
    with pytest.raises(ServerUnavailable, match=r"no\.such\.host\.invalid:1: expected host:port of a host"):
        LookupClient(["127.0.0.1:1", "no.such.host.invalid:1"], "m")


@pytest.mark.parametrize(
    "address", ["", "x", ":1", "a:x", "a:99999", "a b:1", "[::1", "ftp://a:1", "a:1/b", "\udcff:1"]
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected host:port, such as 127\.0\.0\.1:8001"):
        LookupClient(address, "m")


@pytest.mark.parametrize(
    "address", ["localhost:1", "127.0.0.1:1", "[::1]:1", "dns:///name.svc:8001", "my_host-2.x:65535"]
)
def test_addresses_that_grpc_takes_are_taken(address: str) -> None:
    LookupClient(address, "m", 60).close()
