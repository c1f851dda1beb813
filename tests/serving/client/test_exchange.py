"""A lookup and its answer: deadlines, metadata, sizes."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from serving.client import LookupClient
from serving.errors import (
    DeadlineExceeded,
    InternalError,
)
from tests.support.fake_server import Fake
from tests.support.lookups import Lookup


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


def test_answers_are_views_of_what_came(lookup: Lookup, address: str) -> None:
    rows = lookup(address)["x"]
    assert not rows.flags.owndata
    assert not rows.flags.writeable


def test_an_answer_of_another_shape_is_no_answer(lookup: Lookup, fake: Fake, address: str) -> None:
    fake.dim = 3
    with pytest.raises(
        InternalError, match=r"expected embeddings of shape \[1, 2, 2\], got \[1, 2, 3\]: .*new client"
    ):
        lookup(address)
