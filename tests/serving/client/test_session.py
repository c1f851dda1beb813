"""A lookup and its answer: deadlines, metadata, sizes."""

import threading
from typing import Any

import numpy as np
import polars as pl
import pytest

from serving.client import LookupClient
from serving.client.connection import Connection
from serving.errors import (
    ConfigurationError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
)
from tests.support.fake_server import FakeServer
from tests.support.lookups import Lookup


@pytest.mark.parametrize(
    "servers", [pytest.param(1, id="one server"), pytest.param(2, id="time enough to notice a lost one")]
)
def test_a_long_lookup_has_its_deadline(lookup: Lookup, fake: FakeServer, address: str, servers: int) -> None:
    """All of it: nothing is kept back for another server."""
    lookup([address] * servers, timeout_s=1000)
    ((_, _, remaining),) = fake.calls
    assert remaining > 900


def test_answers_and_requests_over_grpc_s_own_limit_pass(lookup: Lookup, address: str) -> None:
    samples = 1_500_000  # 12 MB each way, where gRPC's own limit is 4
    answer = lookup(address, {"x": (np.zeros(0, np.int64), np.zeros(samples, np.int32))})
    assert answer["x"].shape == (samples, 2)


def test_a_deadline_is_always_set(lookup: Lookup, fake: FakeServer, address: str) -> None:
    lookup(address, timeout_s=100)
    (_, _, remaining), *_ = fake.calls
    assert 0 < remaining < 102  # gRPC rounds it up


def test_a_deadline_covers_all_tries(lookup: Lookup, fake: FakeServer, address: str) -> None:
    released = threading.Event()

    def fail(_: Any) -> None:
        released.wait(30)

    fake.fail = fail
    try:
        with pytest.raises(DeadlineExceeded, match=r"the deadline was 0\.5 s: give `timeout_s` to this call"):
            lookup(address, timeout_s=0.5)
    finally:
        released.set()


def test_a_column_of_a_data_frame_is_sent(lookup: Lookup, fake: FakeServer, address: str) -> None:
    frame = pl.DataFrame({"x": [[3, 5], [7]], "day": ["mon", "tue"]})
    assert lookup(address, frame).to_polars().to_dict(as_series=False) == {"x": [[1, 1], [1, 1]]}
    request, *_ = fake.calls[-1]
    assert np.frombuffer(request.raw_input_contents[0], np.int64).tolist() == [3, 5, 7]
    with pytest.raises(InvalidRequest, match="feature 'x': expected no nulls, got one in sample 1"):
        lookup(address, pl.DataFrame({"x": [[3, 5], None]}))


def test_a_request_over_the_limits_is_not_sent(lookup: Lookup, fake: FakeServer, address: str) -> None:
    fake.parameters |= {"max_request_samples": "3", "max_request_ids": "4"}
    with pytest.raises(InvalidRequest, match="samples: expected at most 3 in a request, got 4"):
        lookup(address, {"x": [[1]] * 4})
    with pytest.raises(InvalidRequest, match="ids: expected at most 4 in a request, got 5"):
        lookup(address, {"x": [[1] * 5]})
    assert not fake.calls
    lookup(address, {"x": [[1], [2], [3, 4]]})


def test_a_client_follows_limits_raised_on_the_server(fake: FakeServer, address: str) -> None:
    fake.parameters |= {"max_request_samples": "3"}
    with LookupClient(address, "m", timeout_s=100) as client:
        client.lookup({"x": [[1]]})
        fake.parameters |= {"max_request_samples": "4"}
        assert client.lookup({"x": [[1]] * 4})["x"].shape == (4, 2)


def test_a_call_may_have_its_own_deadline_and_trace(fake: FakeServer, address: str) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with LookupClient(address, "m", timeout_s=1000) as client:
        client.lookup({"x": [[1]]}, timeout_s=100, trace=trace)
    (_, metadata, remaining), *_ = fake.calls
    assert remaining <= 102
    assert metadata["traceparent"] == trace


def test_metadata_is_sent_with_each_call_and_its_function_called_each_time(
    lookup: Lookup, fake: FakeServer, address: str
) -> None:
    lookup(address, metadata={"Authorization": "Bearer one"})
    assert fake.calls[-1][1]["authorization"] == "Bearer one"
    tokens = iter(["config", "two"])
    lookup(address, metadata=lambda: {"authorization": next(tokens)})
    assert fake.calls[-1][1]["authorization"] == "two"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param([("a", "x")], "metadata: expected keys with values, got list", id="pairs"),
        pytest.param("", "metadata: expected keys with values, got str", id="text"),
        pytest.param({"a b": "x"}, "metadata 'a b': expected a key of ASCII letters", id="space"),
        pytest.param({":path": "x"}, "metadata ':path': expected a key", id="of HTTP/2"),
        pytest.param({"": "x"}, "metadata '': expected a key", id="empty"),
        pytest.param({"ä": "x"}, "metadata 'ä': expected a key", id="letter"),
        pytest.param({5: "x"}, "metadata 5: expected a key", id="no text"),
        pytest.param({"a": 5}, "metadata 'a': expected str, got int", id="number"),
        pytest.param({"a": None}, "metadata 'a': expected str, got NoneType", id="none"),
        pytest.param({"a": b"x"}, "metadata 'a': expected str, got bytes", id="bytes"),
        pytest.param({"a": "s\n"}, "metadata 'a': expected printable ASCII characters, got others$", id="line"),
        pytest.param({"a": "ä"}, "metadata 'a': expected printable ASCII characters, got others$", id="value"),
        pytest.param({"a-bin": "x"}, "metadata 'a-bin': expected bytes, got str", id="binary"),
    ],
)
def test_metadata_that_grpc_cannot_send_is_refused_by_key(
    lookup: Lookup, address: str, metadata: Any, message: str
) -> None:
    """Where the client is made; what a function gives, at the call."""
    with pytest.raises(ConfigurationError, match=message):
        LookupClient(address, "m", metadata=metadata)
    with pytest.raises(ConfigurationError, match=message):
        lookup(address, metadata=lambda: metadata)


def test_all_valid_metadata_is_sent(lookup: Lookup, fake: FakeServer, address: str) -> None:
    lookup(address, metadata={"A_.-9": " ~x", "b-bin": b"\xff\x00", "c": ""})
    sent: dict[str, Any] = {**fake.calls[-1][1]}
    assert (sent["a_.-9"], sent["b-bin"], sent["c"]) == (" ~x", b"\xff\x00", "")


def test_a_connection_shows_no_secrets() -> None:
    connection = Connection(addresses=["127.0.0.1:1"], metadata={"authorization": "Bearer one"})
    assert "Bearer" not in repr(connection)


def test_answers_are_read_only_views_of_the_response(lookup: Lookup, address: str) -> None:
    rows = lookup(address)["x"]
    assert not rows.flags.owndata
    assert not rows.flags.writeable


def test_an_answer_of_an_unexpected_shape_is_an_internal_error(
    lookup: Lookup, fake: FakeServer, address: str
) -> None:
    fake.dim = 3
    with pytest.raises(
        InternalError, match=r"expected embeddings of shape \[1, 2, 2\], got \[1, 2, 3\]: .*new client"
    ):
        lookup(address)
