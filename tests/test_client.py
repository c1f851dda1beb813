"""The clients against a server of our own that fails as told: real gRPC, so that what arrives is what arrives."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from serving.client import Answer, AsyncLookupClient, LookupClient, Retries, Tls
from serving.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    LimitExceeded,
    ModelNotFound,
    NotAuthenticated,
    RequestCancelled,
    ServerFault,
    ServerUnavailable,
    ServingError,
)

# What each status of gRPC is to a caller, and whether the client tries again.
STATUSES: dict[grpc.StatusCode, tuple[type[ServingError], bool]] = {
    grpc.StatusCode.CANCELLED: (RequestCancelled, False),
    grpc.StatusCode.UNKNOWN: (ServerFault, False),
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequest, False),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, False),
    grpc.StatusCode.NOT_FOUND: (ModelNotFound, False),
    grpc.StatusCode.ALREADY_EXISTS: (ServerFault, False),
    grpc.StatusCode.PERMISSION_DENIED: (AccessDenied, False),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (LimitExceeded, False),
    grpc.StatusCode.FAILED_PRECONDITION: (ServerFault, False),
    grpc.StatusCode.ABORTED: (ServerUnavailable, True),
    grpc.StatusCode.OUT_OF_RANGE: (InvalidRequest, False),
    grpc.StatusCode.UNIMPLEMENTED: (ServerFault, False),
    grpc.StatusCode.INTERNAL: (ServerFault, False),
    grpc.StatusCode.UNAVAILABLE: (ServerUnavailable, True),
    grpc.StatusCode.DATA_LOSS: (ServerFault, False),
    grpc.StatusCode.UNAUTHENTICATED: (NotAuthenticated, False),
}


class Fake(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A model with one feature `x` of dim 2; each call runs `fail` first, and is remembered."""

    def __init__(self) -> None:
        self.fail: Callable[[Any], None] = lambda _: None
        self.calls: list[tuple[Any, dict[str, str], float]] = []
        self.dim = 2

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        response = pb.ModelConfigResponse()
        for key, value in {"features": "x", "dims": "2", "weighted": "", "contract": "c"}.items():
            response.config.parameters[key].string_value = value
        response.config.output.add(name="embeddings", data_type=11)
        return response

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append((request, dict(context.invocation_metadata()), context.time_remaining()))
        self.fail(context)
        samples = request.inputs[1].shape[1]
        response = pb.ModelInferResponse(model_name="m", model_version="7")
        response.outputs.add(name="embeddings", datatype="FP32", shape=[1, samples, self.dim])
        response.raw_output_contents.append(np.ones(samples * self.dim, np.float32).tobytes())
        return response


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(8), options=limits)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def address(fake: Fake) -> Iterator[str]:
    with serving(fake) as address:
        yield address


Lookup = Callable[..., Answer]


def _sync(address: Any, features: Any = None, timeout_s: float = 20, **options: Any) -> Answer:
    with LookupClient(address, "m", timeout_s, **options) as client:
        return client.lookup(features or {"x": [[1], [2]]})


def _async(address: Any, features: Any = None, timeout_s: float = 20, **options: Any) -> Answer:
    async def run() -> Answer:
        async with AsyncLookupClient(address, "m", timeout_s, **options) as client:
            return await client.lookup(features or {"x": [[1], [2]]})

    return asyncio.run(run())


@pytest.fixture(params=[_sync, _async], ids=["LookupClient", "AsyncLookupClient"])
def lookup(request: pytest.FixtureRequest) -> Lookup:
    """One lookup by a client of each kind."""
    each: Lookup = request.param
    return each


def test_no_status_of_grpc_is_forgotten() -> None:
    assert set(STATUSES) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("status", STATUSES, ids=lambda status: status.name)
def test_every_status_is_a_typed_error(lookup: Lookup, fake: Fake, address: str, status: grpc.StatusCode) -> None:
    kind, retried = STATUSES[status]
    fake.fail = lambda context: context.abort(status, "because")
    with pytest.raises(ServingError, match=rf"^{address}: model 'm': because$") as caught:
        lookup(address, retries=Retries(attempts=3, backoff_s=0.005))
    assert type(caught.value) is kind
    assert len(fake.calls) == (3 if retried else 1)
    assert caught.value.retryable or not retried


def test_an_answer_after_two_failures_is_an_answer(lookup: Lookup, fake: Fake, address: str) -> None:
    def fail(context: Any) -> None:
        if len(fake.calls) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")

    fake.fail = fail
    answer = lookup(address, retries=Retries(backoff_s=0.005))
    assert answer.version == 7
    assert len(fake.calls) == 3


RELOADED = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' has no available versions")
DEAD = (grpc.StatusCode.INTERNAL, "Failed to process: Stub process 'm_0_0' is not healthy.")
FULL = (grpc.StatusCode.INTERNAL, "Failed to increase the shared memory pool size for key 'k' to 9 bytes")


@pytest.mark.parametrize("said", [RELOADED, DEAD], ids=["reloaded", "dead"])
def test_a_model_that_is_about_to_serve_again_is_waited_for(
    lookup: Lookup, fake: Fake, address: str, said: tuple[grpc.StatusCode, str]
) -> None:
    def fail(context: Any) -> None:
        if len(fake.calls) < 8:  # more often than `attempts`
            context.abort(*said)

    fake.fail = fail
    assert lookup(address, retries=Retries(backoff_s=0.005)).version == 7
    assert len(fake.calls) == 8


@pytest.mark.parametrize("said", [RELOADED, DEAD, FULL], ids=["reloaded", "dead", "full"])
def test_what_is_not_over_in_time_is_retryable_and_says_so(
    lookup: Lookup, fake: Fake, address: str, said: tuple[grpc.StatusCode, str]
) -> None:
    fake.fail = lambda context: context.abort(*said)
    with pytest.raises(ServerUnavailable, match=r"try again$") as caught:
        lookup(address, timeout_s=2)
    assert caught.value.retryable
    tries = len(fake.calls)
    assert tries > 3 or (said is FULL and tries == 3)  # what does not fit is not sent for ever
    with pytest.raises(ServerUnavailable):
        lookup(address, retries=Retries(attempts=1))
    assert len(fake.calls) == tries + 1


def test_what_the_server_does_not_have_is_not_asked_for_again(lookup: Lookup, fake: Fake, address: str) -> None:
    for said in ("'m' is not found", "'m' version 7 is not found", "'has no available versions' is not found"):
        fake.calls.clear()
        fake.fail = lambda context, said=said: context.abort(  # type: ignore[misc]
            grpc.StatusCode.NOT_FOUND, f"Request for unknown model: {said}"
        )
        with pytest.raises(ModelNotFound, match=r"is not found$"):
            lookup(address)
        assert len(fake.calls) == 1


def test_a_server_that_does_not_answer_leaves_time_for_another(lookup: Lookup) -> None:
    hanging, other = Fake(), Fake()
    released = threading.Event()

    def hang(_: Any) -> None:
        released.wait(30)

    hanging.fail = hang
    with serving(hanging) as first, serving(other) as second:
        try:
            for _ in range(4):  # the turn of each comes
                lookup([first, second], timeout_s=3)
        finally:
            released.set()
    assert len(other.calls) >= 4


@pytest.mark.parametrize(
    ("servers", "timeout_s"),
    [pytest.param(1, 2.0, id="one server"), pytest.param(2, 6.0, id="time enough to notice a lost one")],
)
def test_a_long_lookup_has_its_deadline(
    lookup: Lookup, fake: Fake, address: str, servers: int, timeout_s: float
) -> None:
    fake.fail = lambda _: time.sleep(0.75 * timeout_s)
    lookup([address] * servers, timeout_s=timeout_s)
    assert len(fake.calls) == 1


def test_one_attempt_is_one_attempt(lookup: Lookup, fake: Fake, address: str) -> None:
    fake.fail = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "no")
    with pytest.raises(ServerUnavailable):
        lookup(address, retries=Retries(attempts=1))
    assert len(fake.calls) == 1


def test_a_large_message_is_tried_again_too(lookup: Lookup, fake: Fake, address: str) -> None:
    """gRPC forgets messages over 256 KiB unless it is told to keep them."""

    def fail(context: Any) -> None:
        if len(fake.calls) < 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")

    fake.fail = fail
    ids = np.arange(1_000_000)
    answer = lookup(address, {"x": (ids, np.array([ids.size]))}, retries=Retries(backoff_s=0.005))
    assert answer["x"].shape == (1, 2)
    assert len(fake.calls) == 2


def test_answers_and_requests_over_grpc_s_own_limit_pass(lookup: Lookup, address: str) -> None:
    samples = 1_500_000  # 12 MB each way, where gRPC's own limit is 4
    answer = lookup(address, {"x": (np.zeros(0, np.int64), np.zeros(samples, np.int32))})
    assert answer["x"].shape == (samples, 2)


def test_a_deadline_is_always_set(lookup: Lookup, fake: Fake, address: str) -> None:
    lookup(address, timeout_s=100)
    (_, _, remaining), *_ = fake.calls
    assert 0 < remaining < 102  # gRPC rounds it up


def test_a_deadline_covers_all_tries(lookup: Lookup, fake: Fake, address: str) -> None:
    released = threading.Event()

    def fail(_: Any) -> None:
        released.wait(30)

    fake.fail = fail
    try:
        with pytest.raises(DeadlineExceeded):
            lookup(address, timeout_s=0.5)
    finally:
        released.set()


def test_a_long_call_and_a_pause_keep_their_connection(fake: Fake, address: str) -> None:
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


def test_a_call_s_own_deadline_and_trace(fake: Fake, address: str) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with LookupClient(address, "m", timeout_s=1000) as client:
        client.lookup({"x": [[1]]}, timeout_s=100, trace=trace)
    (_, metadata, remaining), *_ = fake.calls
    assert remaining <= 102
    assert metadata["traceparent"] == trace


def test_metadata_goes_with_each_call_and_a_function_is_asked_each_time(
    lookup: Lookup, fake: Fake, address: str
) -> None:
    lookup(address, metadata={"Authorization": "Bearer one"})
    assert fake.calls[-1][1]["authorization"] == "Bearer one"
    tokens = iter(["config", "two"])
    lookup(address, metadata=lambda: {"authorization": next(tokens)})
    assert fake.calls[-1][1]["authorization"] == "two"


def test_several_addresses_take_turns(lookup: Lookup) -> None:
    one, other = Fake(), Fake()
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


def test_a_server_that_is_gone_is_passed_over() -> None:
    fake = Fake()
    with serving(fake) as address, LookupClient(["127.0.0.1:1", address], "m", 20) as client:
        for _ in range(10):
            client.lookup({"x": [[1]]})
    assert len(fake.calls) == 10


def test_answers_are_views_of_what_came(lookup: Lookup, address: str) -> None:
    rows = lookup(address)["x"]
    assert not rows.flags.owndata
    assert not rows.flags.writeable


def test_an_answer_of_another_shape_is_no_answer(lookup: Lookup, fake: Fake, address: str) -> None:
    fake.dim = 3
    with pytest.raises(ServerFault, match=r"expected embeddings of shape \[1, 2, 2\], got \[1, 2, 3\]: .*new client"):
        lookup(address)


def test_many_at_once_share_one_channel(fake: Fake, address: str) -> None:
    async def run() -> list[Answer]:
        async with AsyncLookupClient(address, "m", 20) as client:
            return await asyncio.gather(*(client.lookup({"x": [[each]] * each}) for each in range(1, 50)))

    answers = asyncio.run(run())
    assert [len(answer["x"]) for answer in answers] == list(range(1, 50))
    assert len({metadata["user-agent"] for _, metadata, _ in fake.calls}) == 1


def test_a_closed_client_says_so(address: str) -> None:
    client = LookupClient(address, "m")
    client.close()
    client.close()
    with pytest.raises(RequestCancelled, match="the client is closed"):
        client.lookup({"x": [[1]]})

    async def run() -> None:
        client = AsyncLookupClient(address, "m")
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
        pytest.param({"tls": Tls(private_key=Path("nowhere"))}, "expected certificate_chain and private_key together", id="half a certificate"),
        pytest.param({"tls": Tls(root_certificates=Path("/nowhere.pem"))}, r"/nowhere.pem: cannot be read: ", id="no root"),
        pytest.param({"addresses": ["a:1", "b:1"], "shared_memory": True}, "shared_memory: expected one address", id="shared memory"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LookupClient(**({"addresses": "127.0.0.1:1", "model": "m"} | arguments))


@pytest.mark.parametrize("attempts", [0, 6])
def test_retries_are_bounded(attempts: int) -> None:
    with pytest.raises(InvalidRequest, match=f"attempts: expected 1 to 5, got {attempts}"):
        Retries(attempts=attempts)


def test_a_backoff_that_grpc_would_forget_is_refused(fake: Fake, address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"backoff_s: expected 0\.002 to 1000000, got 0\.001"):
        Retries(backoff_s=0.001)
    fake.fail = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "no")
    for _ in range(20):
        with pytest.raises(ServerUnavailable):
            _sync(address, retries=Retries(attempts=2, backoff_s=0.002))


def test_an_address_among_several_has_to_be_found() -> None:
    with pytest.raises(ServerUnavailable, match=r"no\.such\.host\.invalid:1: expected host:port of a host"):
        LookupClient(["127.0.0.1:1", "no.such.host.invalid:1"], "m")
