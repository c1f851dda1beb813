"""Names whose hosts all get other addresses: run as root of a mount and a network namespace, with its own /etc/hosts.

    unshare --mount --net sh -c 'mount --bind FILE /etc/hosts && python -m tests.support.moved_addresses'

Prints, in JSON, who found the new addresses. Exits with 1 if somebody does not.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from serving.client import AsyncLookupClient, LookupClient
from serving.client.connection import Connection
from serving.client.retries import Retries
from serving.errors import ServingError
from serving.protocol.messages import ModelInferRequest
from serving.router.host import Channels
from tests.support.fake_server import FakeServer, serving

PORT = 8001
NAMES = ("one.test", "two.test")
BEFORE, AFTER = ("127.0.0.2", "127.0.0.3"), ("127.0.0.4", "127.0.0.5")
# gRPC resolves a name anew at most once a second, and a client several every 5 s.
PATIENCE_S = 90.0
Ask = Callable[[], Awaitable[object]]


def name(*addresses: str) -> None:
    """Have each name stand for one address."""
    lines = [f"{address} {name}\n" for name, address in zip(NAMES, addresses, strict=True)]
    Path("/etc/hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))


def clients(addresses: list[str]) -> dict[str, Ask]:
    """Who asks, by what it is."""
    blocking, waiting = LookupClient(addresses, "m", 2), AsyncLookupClient(addresses, "m", 2)
    connection = Connection(addresses=addresses, timeout_s=2, retries=Retries(attempts=1))
    channels, channels_of_attempts = Channels(connection, grpc), Channels(connection, grpc.aio)
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="values", shape=[1, 1])
    request.inputs.add(name="lengths", shape=[1, 1])
    message = request.SerializeToString()

    async def by_client() -> None:
        await asyncio.to_thread(blocking.lookup, {"x": [[1]]})

    async def by_router() -> None:
        await asyncio.to_thread(lambda: next(channels.call(0, 2)(message, timeout=2)))
        await channels_of_attempts.call(0, 2)(message, timeout=2).read()

    return {
        "LookupClient": by_client,
        "AsyncLookupClient": lambda: waiting.lookup({"x": [[1]]}),
        "router": by_router,
    }


async def until_answered(ask: Ask, end: float) -> bool:
    """Whether it gets an answer by then."""
    while time.monotonic() < end:
        try:
            await ask()
        except (ServingError, grpc.RpcError):
            await asyncio.sleep(0.1)
        else:
            return True
    return False


async def main() -> None:
    """Move the names from each set of servers to the other."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    name(*BEFORE)
    one, several = [f"{NAMES[0]}:{PORT}"], [f"{name}:{PORT}" for name in NAMES]
    asking: dict[str, Ask] = {f"{who}, one name": ask for who, ask in clients(one).items()}
    asking |= {f"{who}, two names": ask for who, ask in clients(several).items()}
    with ExitStack() as old:
        for host in BEFORE:
            old.enter_context(serving(FakeServer(), host, PORT))
        answered = await asyncio.gather(
            *(until_answered(ask, time.monotonic() + PATIENCE_S) for ask in asking.values())
        )
        assert all(answered), answered
    with ExitStack() as new:
        for host in AFTER:
            new.enter_context(serving(FakeServer(), host, PORT))
        name(*AFTER)
        end = time.monotonic() + PATIENCE_S
        outcomes: list[Any] = await asyncio.gather(*(until_answered(ask, end) for ask in asking.values()))
    print(json.dumps([who for who, is_found in zip(asking, outcomes, strict=True) if is_found]))
    raise SystemExit(not all(outcomes))


if __name__ == "__main__":
    asyncio.run(main())
