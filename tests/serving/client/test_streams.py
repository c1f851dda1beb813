"""Streams of both clients: answers in order, bounded in flight, one version for a batch, errors by batch."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

from export import ExportConfig, export_model
from serving.client import AsyncLookupClient, LookupClient, Retries
from serving.engine import Engine
from serving.errors import ConfigurationError, InvalidRequest, ServerUnavailable
from serving.requests.chunks import ChunkLimits
from serving.server import Ports, run_server
from tests.support.deadlines import PATIENT_S
from tests.support.fake_server import FakeServer
from tests.support.models import SUM, random_bags
from tests.support.ranker import ranker

Stream = Callable[..., Iterator[Any]]


def stream_sync(address: str, batches: Iterable[Any], model: str = "m", **options: Any) -> Iterator[Any]:
    with LookupClient(address, model, PATIENT_S) as client:
        yield from client.stream(batches, **{"method": "lookup"} | options)


def stream_async(
    address: str, batches: Iterable[Any] | AsyncIterable[Any], model: str = "m", **options: Any
) -> Iterator[Any]:
    """Each answer is taken before the next one is asked for."""
    loop = asyncio.new_event_loop()

    async def answers() -> AsyncIterator[Any]:
        async with AsyncLookupClient(address, model, PATIENT_S) as client:
            async for answer in client.stream(batches, **{"method": "lookup"} | options):
                yield answer

    with closing(loop):
        stream: Any = answers()
        try:
            while True:
                try:
                    yield loop.run_until_complete(anext(stream))
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(stream.aclose())


@pytest.fixture(params=[stream_sync, stream_async], ids=["LookupClient", "AsyncLookupClient"])
def stream(request: pytest.FixtureRequest) -> Stream:
    function: Stream = request.param
    return function


@pytest.fixture
def chunks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.client.streams.chunk_limits", lambda *_: ChunkLimits(2, 100))


def batch(samples: int) -> dict[str, Any]:
    return {"x": [[1]] * samples}


@pytest.mark.usefixtures("chunks_of_two")
def test_batches_are_answered_in_order_when_requests_finish_out_of_order(
    fake: FakeServer, address: str, stream: Stream
) -> None:
    first = threading.Event()

    def fail(_: Any) -> None:
        if len(fake.calls) == 1:
            first.wait(PATIENT_S)
        elif len(fake.calls) == 4:
            first.set()

    fake.fail = fail
    done: list[int] = []
    sizes = [3, 1, 2, 5]
    answers = stream(address, map(batch, sizes), in_flight=4, progress=done.append)
    assert [len(answer["x"]) for answer in answers] == sizes
    assert done == [3, 4, 6, 11]
    assert sorted(request.inputs[1].shape[1] for request, *_ in fake.calls) == [1, 1, 1, 2, 2, 2, 2]


def test_requests_in_flight_and_batches_read_ahead_are_bounded(
    fake: FakeServer, address: str, stream: Stream
) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def fail(_: Any) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    fake.fail = fail
    batches_read = 0

    def batches() -> Iterator[Any]:
        nonlocal batches_read
        for _ in range(20):
            batches_read += 1
            yield batch(1)

    for number, _ in enumerate(stream(address, batches(), in_flight=3)):
        assert batches_read <= number + 3
    assert (batches_read, most <= 3, most > 1) == (20, True, True)


@pytest.mark.usefixtures("chunks_of_two")
def test_an_error_has_the_place_and_the_number_of_its_batch(fake: FakeServer, address: str, stream: Stream) -> None:
    def fail(context: Any) -> None:
        if fake.calls[-1][0].inputs[1].shape[1] == 1:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "feature 'x': odd")

    fake.fail = fail
    batches = [batch(2), batch(3), {"y": [[1]]}, {"x": [[None]]}, batch(4)]
    answers = stream(address, batches, in_flight=1)
    assert len(next(answers)["x"]) == 2
    with pytest.raises(
        InvalidRequest, match=r"^batch 1: sample 2 of the batch \(sample 0 below is sample 2\): .*feature 'x': odd"
    ):
        next(answers)
    first, odd, other, null, last = stream(address, batches, in_flight=1, errors="yield")
    assert (len(first["x"]), len(last["x"])) == (2, 4)
    assert [str(error)[:7] for error in (odd, other, null)] == ["batch 1", "batch 2", "batch 3"]
    assert "expected one of 'x'" in str(other)
    assert "got one in sample 0" in str(null)


def test_a_batch_that_cannot_be_encoded_waits_for_its_place(fake: FakeServer, address: str, stream: Stream) -> None:
    fake.fail = lambda _: time.sleep(0.1)
    first, error = stream(address, [batch(1), {"y": [[1]]}], errors="yield")
    assert len(first["x"]) == 1
    assert str(error).startswith("batch 1: ")


def assert_answered_before(failure: Exception, answers: Iterator[Any]) -> None:
    assert [len(next(answers)["x"]) for _ in range(2)] == [1, 2]
    with pytest.raises(type(failure), match=f"^{failure}$"):
        next(answers)


@pytest.mark.parametrize("failure", [OSError("no such file"), InvalidRequest("not of this stream")], ids=type)
def test_an_error_of_the_iterable_follows_the_answers_to_earlier_batches(
    address: str, stream: Stream, failure: Exception
) -> None:
    """Requests may be in flight when it is raised. It is raised also where errors of batches are yielded."""

    def batches() -> Iterator[Any]:
        yield batch(1)
        yield batch(2)
        raise failure

    async def asynchronous_batches() -> AsyncIterator[Any]:
        for samples in batches():
            yield samples

    assert_answered_before(failure, stream(address, batches(), errors="yield"))
    assert_answered_before(failure, stream_async(address, asynchronous_batches(), errors="yield"))


def test_a_server_that_is_unavailable_is_waited_for(fake: FakeServer, address: str, stream: Stream) -> None:
    """Three attempts, which gRPC makes, end long before a server has restarted."""

    def fail(context: Any) -> None:
        if 1 < len(fake.calls) < 9:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    fake.fail = fail
    assert [len(answer["x"]) for answer in stream(address, [batch(1), batch(2)], in_flight=1)] == [1, 2]
    assert len(fake.calls) == 9


def test_without_retries_no_server_is_waited_for(fake: FakeServer, address: str) -> None:
    fake.fail = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
    with (
        LookupClient(address, "m", PATIENT_S, retries=Retries(attempts=1)) as client,
        pytest.raises(ServerUnavailable, match=r"^batch 0: .*restarting"),
    ):
        next(client.stream([batch(1)], method="lookup"))
    assert len(fake.calls) == 1


@pytest.mark.usefixtures("chunks_of_two")
def test_a_batch_is_answered_by_one_version(fake: FakeServer, address: str, stream: Stream) -> None:
    """The first request is answered by an old version, and is sent again."""

    def fail(_: Any) -> None:
        fake.version = "7" if len(fake.calls) == 1 else "8"

    fake.fail = fail
    assert [answer.version for answer in stream(address, [batch(6)], in_flight=1)] == [8]
    assert len(fake.calls) == 4


@pytest.mark.usefixtures("chunks_of_two")
def test_versions_that_alternate_are_refused(fake: FakeServer, address: str, stream: Stream) -> None:
    def fail(_: Any) -> None:
        fake.version = str(len(fake.calls))

    fake.fail = fail
    with pytest.raises(ServerUnavailable, match=r"^batch 0: expected one model version for all of a batch"):
        next(stream(address, [batch(6)], in_flight=1))


def test_asynchronous_batches_are_taken_as_they_come(address: str) -> None:
    async def batches() -> AsyncIterator[Any]:
        for samples in (1, 2):
            await asyncio.sleep(0)
            yield batch(samples)

    async def run() -> list[int]:
        async with AsyncLookupClient(address, "m", PATIENT_S) as client:
            return [len(answer["x"]) async for answer in client.stream(batches(), method="lookup")]

    assert asyncio.run(run()) == [1, 2]


@pytest.mark.parametrize("in_flight", [0, 1025, 1.5, True])
def test_a_number_in_flight_is_from_1_to_1024(address: str, in_flight: Any) -> None:
    with LookupClient(address, "m", PATIENT_S) as client, pytest.raises(ConfigurationError, match=r"^in_flight: "):
        client.stream([], in_flight=in_flight)
    with pytest.raises(ConfigurationError, match=r"^in_flight: "):
        AsyncLookupClient(address, "m", PATIENT_S).stream([], in_flight=in_flight)


@pytest.mark.parametrize(
    "batches", [pa.table({"x": [1]}), {"x": [1]}, "x", 5, None], ids=lambda it: type(it).__name__
)
def test_one_batch_in_place_of_several_is_refused(address: str, batches: Any) -> None:
    with (
        LookupClient(address, "m", PATIENT_S) as client,
        pytest.raises(
            ConfigurationError,
            match=r"^batches: expected an iterable of batches, got \w+: one batch is a list, \[batch\]",
        ),
    ):
        client.stream(batches)


def test_lookups_have_no_outputs_to_choose(address: str) -> None:
    with LookupClient(address, "m", PATIENT_S) as client, pytest.raises(ConfigurationError, match=r"^outputs: "):
        client.stream([], method="lookup", outputs=["click"])


def test_a_hundred_thousand_rows_are_scored_as_by_an_engine(tmp_path: Path) -> None:
    """More rows than a request may have."""
    repository = tmp_path / "repository"
    bundle = export_model(ranker(), repository, "ranker", ExportConfig(scores=True))
    random = np.random.default_rng(0)
    rows = 100_000
    numbers = {"user": random.random((rows, 3), np.float32), "item": random.random((rows, 2), np.float32)}
    lists = {
        name: pa.FixedSizeListArray.from_arrays(value.ravel(), value.shape[1]) for name, value in numbers.items()
    }
    ids = {name: random.integers(0, 10, rows) for name in random_bags(random, SUM, 0)}
    table = pa.table({**ids, **lists})
    with Engine.open(bundle) as engine:
        (expected,) = engine.stream([table])
    with run_server(repository, Ports(grpc=0, http=0, operations=0), log=tmp_path / "log") as server:
        for stream in (stream_sync, stream_async):
            (answer,) = stream(server.grpc, [table], "ranker", method="score")
            for name, scores in expected.items():
                np.testing.assert_allclose(answer[name], scores, atol=1e-6)
            assert answer.version == 1
            wrong = table.set_column(2, "z", pa.array([*[0] * 99_999, 10]))
            (error,) = stream(server.grpc, [wrong], "ranker", method="score", errors="yield")
            assert re.match(
                r"batch 0: samples 98304 to 99999 of the batch \(sample 0 below is sample 98304\): .*feature 'z': expected an id in \[0, 10\)",
                str(error),
            )
