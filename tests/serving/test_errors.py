"""Every status a client can meet has an error of ours."""

import re
from pathlib import Path

import grpc
import pytest

import export.errors
import serving.errors
from export.errors import ExportError
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


def test_the_page_has_every_error_with_its_status() -> None:
    page = (Path(serving.errors.__file__).parents[1] / "docs" / "errors.md").read_text()
    for error in vars(serving.errors).values():
        if isinstance(error, type) and issubclass(error, ServingError) and error is not ServingError:
            retry = "yes" if error.retryable else "no"
            assert re.search(rf"─ {error.__name__} +{error.code} +{retry} ", page), error
    for error in vars(export.errors).values():
        if isinstance(error, type) and issubclass(error, ExportError):
            assert re.search(rf"──.*\b{error.__name__}\b", page), error
