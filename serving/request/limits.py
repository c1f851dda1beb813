"""How large a request, a TBE call and a backlog may be.

A request is never refused for what it was merged with: requests that are too large together take several TBE calls.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from serving.errors import InvalidRequest, Reason
from serving.request.tensors import KjtRequest


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
    def max_busy_ms(self) -> int:
        """Longest time in which a backlog is answered; what is left then is refused."""


def check_size(ids: int, samples: int, limits: Limits) -> None:
    """Refuse a request that has more ids or samples than `limits` allow.

    Raises:
        InvalidRequest: naming the limit, the number that came and what to do.
    """
    _expect_at_most("ids", ids, limits.max_request_ids)
    _expect_at_most("samples", samples, limits.max_request_samples)


def grouped(requests: Sequence[KjtRequest], limits: Limits) -> Iterator[list[int]]:
    """Divide requests into groups, each for one TBE call.

    Yields:
        The positions of a group's requests, in order. A request that is larger than a call may be is a group alone.
    """
    group: list[int] = []
    ids = samples = 0
    for position, request in enumerate(requests):
        ids += request.values.size
        samples += request.samples
        if group and (ids > limits.max_call_ids or samples > limits.max_call_samples):
            yield group
            group, ids, samples = [], request.values.size, request.samples
        group.append(position)
    if group:
        yield group


def _expect_at_most(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise InvalidRequest(
            f"{what}: expected at most {limit} in a request, got {found}: send several requests, or have the "
            f"server's limit raised (`tbe-serve configure --max-request-{what}`)",
            Reason.SIZE,
        )
