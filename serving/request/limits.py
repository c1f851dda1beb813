"""How large a request, a TBE call and a backlog may be.

A request is never refused for what it was merged with: requests that are too large together take several TBE calls.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from serving.errors import InvalidRequest, Reason
from serving.request.bags import bag_bounds
from serving.request.jagged import bounds_of
from serving.request.tensors import SEQUENCES, KjtRequest


class Limits(Protocol):
    """The settings that the request path needs. Defaults are in `serving.model.settings`, and nowhere else."""

    @property
    def max_request_ids(self) -> int:
        """Most ids in a request; larger ones are refused."""

    @property
    def max_request_samples(self) -> int:
        """Most samples in a request; larger ones are refused."""

    @property
    def merged_requests(self) -> int:
        """Most requests that one TBE call answers."""

    @property
    def max_call_ids(self) -> int:
        """Most ids in a TBE call."""

    @property
    def max_call_samples(self) -> int:
        """Most samples in a TBE call."""

    @property
    def max_sequence_bytes(self) -> int:
        """Most bytes of rows in the answer to a request, and to the requests of one group."""

    @property
    def max_busy_ms(self) -> int:
        """Longest time in which a backlog is answered; what is left then is refused."""


def check_size(ids: int, samples: int, limits: Limits) -> None:
    """Refuse a request that has more ids or samples than `limits` allow.

    Raises:
        InvalidRequest: naming the limit, the number that came and what to do.
    """
    _expect_at_most("ids", ids, limits.max_request_ids, "max-request-ids")
    _expect_at_most("samples", samples, limits.max_request_samples, "max-request-samples")


def check_sequences(request: KjtRequest, limits: Limits) -> None:
    """Refuse a request whose sequences would be larger than `limits` allow. Its lengths need not be right.

    Raises:
        InvalidRequest: naming the limit, the bytes that came and what to do.
    """
    _expect_at_most("bytes of sequences", sequence_bytes(request), limits.max_sequence_bytes, "max-sequence-bytes")


def sequence_bytes(request: KjtRequest) -> int:
    """Bytes of the rows that a request asks for, as FP32."""
    selection = request.selection
    if selection.pooled is selection or SEQUENCES not in request.outputs:
        return 0
    bags = bag_bounds(len(selection.names), request.samples, request.once)
    ids = np.diff(bounds_of(request.lengths.astype(np.int64))[bags])
    return int(ids[selection.sequence] @ selection.dims[selection.sequence]) * np.dtype(np.float32).itemsize


def grouped(requests: Sequence[KjtRequest], limits: Limits) -> Iterator[list[int]]:
    """Divide requests into groups, each for one TBE call.

    Yields:
        The positions of a group's requests, in order. A request that is larger than a call may be is a group alone.
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


def _expect_at_most(what: str, found: int, limit: int, setting: str) -> None:
    if found > limit:
        raise InvalidRequest(
            f"{what}: expected at most {limit} in a request, got {found}: send several requests, or have the "
            f"server's limit raised (`tbe-serve configure --{setting}`)",
            Reason.SIZE,
        )
