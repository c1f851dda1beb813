"""Limits of a request and of a TBE call.

Requests that are too large for one TBE call take several calls.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from serving.bundle.tensor_names import SEQUENCES
from serving.errors import InvalidRequest, Reason
from serving.requests.layout import bag_bounds
from serving.requests.offsets import bounds_of
from serving.requests.types import KjtRequest


class RequestLimits(Protocol):
    """The settings that limit the size of a request, which clients also know."""

    @property
    def max_request_ids(self) -> int:
        """Maximum ids of a request; larger requests are refused."""

    @property
    def max_request_samples(self) -> int:
        """Maximum samples of a request; larger requests are refused."""


class Limits(RequestLimits, Protocol):
    """The settings that limit requests, TBE calls and the backlog. Defaults are in `serving.model.settings` only."""

    @property
    def merged_requests(self) -> int:
        """Maximum requests that a TBE call answers."""

    @property
    def max_call_ids(self) -> int:
        """Maximum ids of a TBE call."""

    @property
    def max_call_samples(self) -> int:
        """Maximum samples of a TBE call."""

    @property
    def max_sequence_bytes(self) -> int:
        """Maximum bytes of unpooled rows, as FP32, and of jagged inputs of scores, of a request and of a group."""

    @property
    def max_busy_ms(self) -> int:
        """Load shedding: requests that have waited for more milliseconds are refused."""


def check_size(ids: int, samples: int, limits: RequestLimits) -> None:
    """Refuse a request that has more ids or samples than `limits` allow.

    Raises:
        InvalidRequest: the request is too large. The message names the limit, and says what to do.
    """
    _expect_at_most("ids", ids, limits.max_request_ids, "max-request-ids")
    _expect_at_most("samples", samples, limits.max_request_samples, "max-request-samples")


def check_accepted(request: KjtRequest, limits: Limits) -> None:
    """Refuse an accepted request, whose lengths are not checked yet, that exceeds a limit that only servers know.

    Today, it is the limit of the bytes of its sequences.

    Raises:
        InvalidRequest: the request is too large. The message names the limit, and says what to do.
    """
    _expect_at_most("bytes of sequences", sequence_bytes(request), limits.max_sequence_bytes, "max-sequence-bytes")


def sequence_bytes(request: KjtRequest) -> int:
    """The bytes of a request's unpooled rows, as FP32, and of the jagged inputs of its scores."""
    feature_set = request.feature_set
    if feature_set.pooled is feature_set or SEQUENCES not in request.outputs:
        return request.jagged_bytes
    bags = bag_bounds(len(feature_set.names), request.samples, request.shared)
    ids = np.diff(bounds_of(request.lengths.astype(np.int64))[bags])
    answered = int(ids[feature_set.sequence] @ feature_set.dims[feature_set.sequence]) * np.dtype(np.float32).itemsize
    return answered + request.jagged_bytes


def grouped(requests: Sequence[KjtRequest], limits: Limits) -> Iterator[list[int]]:
    """Divide requests into groups, each for one TBE call.

    Yields:
        The positions of a group's requests, in order. A request that is too large for a call is a separate group.
    """
    group: list[int] = []
    ids = samples = row_bytes = 0
    for position, request in enumerate(requests):
        ids += request.values.size
        samples += request.samples
        row_bytes += (own_row_bytes := sequence_bytes(request))
        too_large = samples > limits.max_call_samples or row_bytes > limits.max_sequence_bytes
        if group and (ids > limits.max_call_ids or too_large):
            yield group
            group, ids, samples, row_bytes = [], request.values.size, request.samples, own_row_bytes
        group.append(position)
    if group:
        yield group


def _expect_at_most(what: str, count: int, limit: int, setting: str) -> None:
    if count > limit:
        raise InvalidRequest(
            f"{what}: expected at most {limit} in a request, got {count}: send several requests, or have the "
            f"server's limit raised (`tbe-serve configure --{setting}`)",
            Reason.SIZE,
        )
