"""Every status a client can meet has an error of ours."""

import grpc
import pytest

from serving.errors import ServingError, from_status


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
def test_every_grpc_status_maps_to_an_error(status: grpc.StatusCode) -> None:
    error = from_status(status.name, "said so")
    assert isinstance(error, ServingError)
    assert type(error) is not ServingError
    assert str(error) == "said so"
    retryable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert error.retryable == (status in retryable)
    if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL):
        assert not error.retryable
        assert error.code == status.name
