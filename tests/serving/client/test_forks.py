"""Clients in forked children and in other processes."""

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from serving.client import AsyncLookupClient, LookupClient, Retries
from tests.support.fake_server import FakeServer, serving

# A parent that has asked, and its child: each prints what a client that it has and a new one say.
_FORK = """
import asyncio, os, sys, threading, time
from serving.client import AsyncLookupClient, LookupClient
from serving.client.forks import _PROCESS
from serving.errors import ServingError

address, how = sys.argv[1:]

def ask(client):
    try:
        return str(client.lookup({"x": [[1]]}, timeout_s=20).version)
    except ServingError as error:
        return f"{type(error).__name__}: {error}"

async def ask_async(client):
    try:
        return str((await client.lookup({"x": [[1]]}, timeout_s=20)).version)
    except ServingError as error:
        return f"{type(error).__name__}: {error}"

def forked(client):
    if (child := os.fork()) == 0:
        print("own", ask(client))
        print("new", ask(LookupClient(address, "m")))
        print("asyncio", asyncio.run(ask_async(AsyncLookupClient(address, "m"))), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

async def under_asyncio(client):
    other = AsyncLookupClient(address, "m")
    assert await ask_async(other) == "7"
    forked(client)
    assert await ask_async(other) == "7"

client = LookupClient(address, "m")
assert ask(client) == "7"
if how == "idle":
    forked(client)
elif how == "asyncio":
    asyncio.run(under_asyncio(client))
else:
    thread = threading.Thread(target=client.lookup, args=[{"x": [[2]]}], kwargs={"timeout_s": 60})
    thread.start()
    while not _PROCESS.calls:
        time.sleep(0.01)
    forked(client)
    print("forked", flush=True)
    thread.join()
assert ask(client) == "7"
"""


def children(address: str, how: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _FORK, address, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_forked_child_makes_its_own_connection(fake: FakeServer, address: str) -> None:
    peers: list[str] = []
    fake.fail = lambda context: peers.append(context.peer())
    out, errors = children(address, "idle").communicate(timeout=100)
    assert out.splitlines() == ["own 7", "new 7", "asyncio 7"], errors
    assert peers[0] == peers[-1]  # the parent's connection has outlived the child
    assert peers[1] != peers[0]


def test_a_child_forked_during_a_call_is_refused_in_time() -> None:
    fake, released = FakeServer(), threading.Event()

    def hold(_: Any) -> None:
        if fake.calls[-1][0].raw_input_contents[0][0] == 2:
            released.wait(100)

    fake.fail = hold
    with serving(fake) as address:
        process = children(address, "during a call")
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(4)]
        finally:
            released.set()
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    for line, client in zip(said, ("own", "new", "asyncio"), strict=False):
        assert line.startswith(
            f"{client} ConfigurationError: {address}: this process was forked while another thread"
        )
        assert line.endswith("start it by `spawn` or `forkserver`, or before the parent's first call\n")
    assert said[3] == "forked\n"


def test_a_child_of_a_process_with_asyncio_clients_is_refused(address: str) -> None:
    out, errors = children(address, "asyncio").communicate(timeout=100)
    assert [line.split(" (")[0].split(":")[0] for line in out.splitlines()] == [
        f"{client} ConfigurationError" for client in ("own", "new", "asyncio")
    ], errors
    assert out.count("forked from one that has asyncio clients") == 3


@pytest.mark.parametrize("kind", [LookupClient, AsyncLookupClient])
def test_a_client_can_be_pickled_and_copied(kind: Any, fake: FakeServer, address: str) -> None:
    client = kind(address, "m", 20, retries=Retries(attempts=2), metadata={"token": "secret"})
    for again in (pickle.loads(pickle.dumps(client)), copy.copy(client)):
        assert (again._model, again._connection) == ("m", client._connection)
    if kind is LookupClient:
        with client, pickle.loads(pickle.dumps(client)) as again:
            assert client.lookup({"x": [[1]]}).version == again.lookup({"x": [[1]]}).version == 7
        assert [metadata["token"] for _, metadata, _ in fake.calls] == ["secret"] * 2
