"""AsyncLookupClient in another event loop, without one, cancelled, and closed while it is asked: errors of ours."""

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from serving.client import AsyncLookupClient, LookupClient
from serving.errors import ConfigurationError, InternalError, RequestCancelled
from tests.support.fake_server import FakeServer, serving


@pytest.fixture
def waiting_call() -> Iterator[tuple[FakeServer, str, threading.Event, threading.Event]]:
    """A server that holds its answers: itself, its address, what is set when it was asked, and what lets them go."""
    fake, received, released = FakeServer(), threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        received.set()
        released.wait(100)

    with serving(fake) as address:
        fake.fail = hold
        try:
            yield fake, address, received, released
        finally:
            released.set()


async def ask(client: AsyncLookupClient) -> int:
    return (await client.lookup({"x": [[1]]}, timeout_s=60)).version


async def new_client(address: str) -> AsyncLookupClient:
    return AsyncLookupClient(address, "m")


async def made_and_used(address: str) -> AsyncLookupClient:
    client = AsyncLookupClient(address, "m")
    assert await ask(client) == 7
    return client


def test_a_client_made_without_a_loop_binds_to_the_first_one(address: str) -> None:
    client = AsyncLookupClient(address, "m")

    async def run() -> None:
        async with client:
            assert [await ask(client), await ask(client)] == [7, 7]

    asyncio.run(run())


@pytest.mark.parametrize("before", [new_client, made_and_used])
def test_another_event_loop_is_refused(before: Any, address: str) -> None:
    client = asyncio.run(before(address))
    with pytest.raises(ConfigurationError, match=f"^{re.escape(address)}: was made or used in another event loop: "):
        asyncio.run(ask(client))
    asyncio.run(client.close())
    with pytest.raises(RequestCancelled, match="the client is closed"):
        asyncio.run(ask(client))


def test_a_loop_of_another_thread_is_refused_while_the_first_runs(address: str) -> None:
    async def run() -> None:
        client = await made_and_used(address)
        with pytest.raises(ConfigurationError, match="in another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(ask(client)))
        assert await ask(client) == 7
        await asyncio.to_thread(lambda: asyncio.run(client.close()))  # it is closed in its own
        with pytest.raises(RequestCancelled):
            await ask(client)

    asyncio.run(run())


def test_a_call_without_an_event_loop_is_refused(address: str) -> None:
    client = AsyncLookupClient(address, "m")
    with pytest.raises(ConfigurationError, match="expected to be awaited in a running event loop"):
        ask(client).send(None)
    for one in (client, asyncio.run(made_and_used(address))):
        with pytest.raises(StopIteration):  # it has ended
            one.close().send(None)


def test_closing_a_client_cancels_its_pending_calls(
    waiting_call: tuple[FakeServer, str, threading.Event, threading.Event],
) -> None:
    _, address, received, _ = waiting_call

    async def run() -> None:
        client = await new_client(address)
        tasks = [asyncio.create_task(ask(client)) for _ in range(3)]
        await asyncio.to_thread(received.wait, 60)
        await client.close()
        for task in tasks:
            with pytest.raises(RequestCancelled, match="the client is closed"):
                await task
            assert not task.cancelled()

    asyncio.run(run())


def test_closing_a_blocking_client_cancels_its_pending_call(
    waiting_call: tuple[FakeServer, str, threading.Event, threading.Event],
) -> None:
    _, address, received, _ = waiting_call
    client = LookupClient(address, "m", 60)
    errors: list[Exception] = []

    def lookup() -> None:
        try:
            client.lookup({"x": [[1]]})
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=lookup)
    thread.start()
    received.wait(60)
    client.close()
    thread.join(60)
    assert [type(error) for error in errors] == [RequestCancelled]


def test_a_task_that_is_cancelled_is_cancelled(
    waiting_call: tuple[FakeServer, str, threading.Event, threading.Event],
) -> None:
    fake, address, received, released = waiting_call

    async def run() -> None:
        async with AsyncLookupClient(address, "m") as client:
            task = asyncio.create_task(ask(client))
            await asyncio.to_thread(received.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(client), 0.05)
            released.set()
            fake.fail = lambda _: None
            assert await ask(client) == 7

    asyncio.run(run())


def test_an_answer_that_is_no_message_is_an_internal_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc.aio gives None for it."""

    async def run() -> None:
        async with AsyncLookupClient(address, "m") as client:
            await ask(client)
            real = client._channel.methods

            def methods(timeout_s: float) -> Any:
                async def answer(*_: Any, **__: Any) -> None:
                    return None

                return real(timeout_s) | {"ModelInfer": answer}

            monkeypatch.setattr(client._channel, "methods", methods)
            with pytest.raises(InternalError, match="expected a message of KServe's protocol, got other bytes"):
                await ask(client)

    asyncio.run(run())
