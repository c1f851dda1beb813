"""Names of servers: what gRPC is told to connect to, and that new addresses are found."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serving.client import AsyncLookupClient, LookupClient, targets
from serving.client.targets import Target, address_host
from serving.errors import ServerUnavailable
from tests.support.fake_server import FakeServer, serving

NAMES = ["one.test:1", "two.test:2"]
PATIENCE_S = 60.0


class Resolver:
    """`socket.getaddrinfo` with names of its own: a list of "ip:port" each. A name without any cannot be resolved."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def __call__(self, host: str, *_: Any) -> list[Any]:
        if not self.names.get(host):
            raise socket.gaierror(-2, "Name or service not known")
        endpoints = (address.rpartition(":") for address in self.names[host])
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, int(port))) for ip, _, port in endpoints]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    monkeypatch.setattr(targets, "_RESOLVE_S", 0.0)
    return resolver


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_addresses_of_all_names_are_used(resolver: Resolver) -> None:
    resolver.names = {"one.test": ["10.0.0.1:1", "10.0.0.2:1"], "two.test": ["10.0.0.3:2", "10.0.0.1:1"]}
    assert Target(NAMES).now() == "ipv4:10.0.0.1:1,10.0.0.2:1,10.0.0.3:2"


def test_a_single_address_is_resolved_by_grpc(resolver: Resolver) -> None:
    assert resolver.names == {}
    assert Target(["one.test:1"]).now() == "one.test:1"


def test_a_name_that_cannot_be_resolved_at_first_is_refused(resolver: Resolver) -> None:
    resolver.names = {"one.test": ["10.0.0.1:1"]}
    with pytest.raises(ServerUnavailable, match=r"^two\.test:2: expected host:port of a host with an IPv4 address"):
        Target(NAMES)


def test_a_name_keeps_its_addresses_until_they_change(resolver: Resolver) -> None:
    resolver.names = {"one.test": ["10.0.0.1:1", "10.0.0.2:1"], "two.test": ["10.0.0.3:2"]}
    target = Target(NAMES)
    resolver.names = {"one.test": ["10.0.0.2:1", "10.0.0.1:1"], "two.test": []}  # in another order, and gone
    for _ in range(3):
        assert target.now() == "ipv4:10.0.0.1:1,10.0.0.2:1,10.0.0.3:2"
        thread = target._thread
        assert thread is not None
        thread.join(PATIENCE_S)
    resolver.names = {"one.test": ["10.0.0.9:1"], "two.test": []}
    until(lambda: target.now() == "ipv4:10.0.0.9:1,10.0.0.3:2")


def test_names_are_not_resolved_for_each_call(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_RESOLVE_S", 1e6)
    resolver.names = {"one.test": ["10.0.0.1:1"], "two.test": ["10.0.0.3:2"]}
    target = Target(NAMES)
    resolver.names = {}
    assert [target.now() for _ in range(3)] == ["ipv4:10.0.0.1:1,10.0.0.3:2"] * 3
    assert target._thread is None


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("a.b:1", "a.b"),
        ("dns:///a.b:1", "a.b"),
        ("ipv4:1.2.3.4:1", "1.2.3.4"),
        ("[::1]:1", "::1"),
        ("ipv6:[::1]:1", "::1"),
    ],
)
def test_the_host_of_an_address_is_parsed(address: str, host: str) -> None:
    assert address_host(address) == host


@pytest.mark.parametrize("kind", [LookupClient, AsyncLookupClient])
def test_a_call_in_progress_is_answered_while_names_move(
    kind: type[LookupClient | AsyncLookupClient], resolver: Resolver
) -> None:
    old, new = FakeServer(), FakeServer()
    received, released = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        received.set()
        released.wait(PATIENCE_S)

    async def lookup(client: Any) -> int:
        if kind is LookupClient:
            return int((await asyncio.to_thread(client.lookup, {"x": [[1]]}, timeout_s=PATIENCE_S)).version)
        return int((await client.lookup({"x": [[1]]}, timeout_s=PATIENCE_S)).version)

    async def run() -> None:
        with serving(old) as first, serving(new) as second:
            resolver.names = {"one.test": [first], "two.test": [first]}
            client: Any = kind(NAMES, "m")
            await lookup(client)
            old.fail = hold
            pending = asyncio.create_task(lookup(client))
            await asyncio.to_thread(received.wait, PATIENCE_S)
            resolver.names = {"one.test": [second], "two.test": [second]}
            end = time.monotonic() + PATIENCE_S
            old.fail = lambda _: None
            while not new.calls:
                assert time.monotonic() < end
                await lookup(client)
            assert not pending.done()
            released.set()
            assert await pending == 7
            if isinstance(closed := client.close(), Awaitable):
                await closed

    asyncio.run(run())


def test_clients_and_routers_follow_names_to_new_addresses(tmp_path: Path) -> None:
    """One name and several, in clients and in the channels of a router, by /etc/hosts of a namespace of its own."""
    hosts = tmp_path / "hosts"
    hosts.touch()
    mount = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} -m tests.support.moved_addresses"
    namespace = ("unshare", "--mount", "--net", *(() if os.getuid() == 0 else ("--user", "--map-root-user")))
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}  # ip, where only root looks
    done = subprocess.run(
        [*namespace, "sh", "-c", mount], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(done.stdout)) == {
        *("LookupClient, one name", "LookupClient, two names", "AsyncLookupClient, one name"),
        *("AsyncLookupClient, two names", "router, one name", "router, two names"),
    }
