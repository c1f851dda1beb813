"""Answer the requests that Triton hands over together, with as few TBE calls as the limits allow.

Load is shed here: requests that waited too long in a backlog are refused, mostly before they are decoded. Triton's
own queue limits stall an idle model (docs/decisions/0009).
"""

import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from serving.backend.metrics import LookupMetrics
from serving.backend.recorder import Recorder
from serving.backend.spans import Spans
from serving.engine import Engine, GroupAnswer, Outcome
from serving.errors import (
    HostUnavailable,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    ServerUnavailable,
    ServingError,
)
from serving.lookup.batch_answer import zeroed_of
from serving.model.settings import LARGEST_HANDOVER
from serving.requests.accept import accept, check_bundle
from serving.requests.limits import Limits, grouped
from serving.requests.types import Array, KjtRequest, Tensors

# Least number of TBE calls for a backlog, however long they take: a few large requests are no overload.
_MIN_CALLS = 4
# A handover that follows the last one within this time belongs to the same backlog. Triton copies the 256 requests of
# the largest handover in less than this.
_SAME_BACKLOG_S = 0.05


class Backlog:
    """An estimate of how long requests wait for this instance.

    Triton hands over a limited number of requests at once, so more requests may be waiting. A full handover that
    immediately follows a full one belongs to the same backlog.

    Args:
        max_busy_ms: longest time in which a backlog is answered.
        largest_handover: largest number of requests that Triton hands over together.

    Attributes:
        waited_s: longest time that the requests of this handover may have waited in the backend, in seconds.
        started: when Triton handed over the last requests, by `perf_counter`.
    """

    def __init__(self, max_busy_ms: int, largest_handover: int) -> None:
        self.waited_s = self.started = 0.0
        self._max_busy_ms = max_busy_ms
        self._largest_handover = largest_handover
        self._is_full = False
        self._calls = 0
        # Times of `perf_counter`: of the backlog's first handover, and of the end of the last handover.
        self._since = self._ended = 0.0

    def start_handover(self, requests: int) -> None:
        """Note that Triton handed over this number of requests."""
        now = perf_counter()
        follows_at_once = now - self._ended < _SAME_BACKLOG_S
        is_full = requests >= self._largest_handover
        if not (self._is_full and is_full and follows_at_once):
            self._since, self._calls = now, 0
        # They may have waited while the last handover was answered, and earlier, as Triton may have two ready.
        self.waited_s = self._ended - self.started + self.waited_s / 2 if follows_at_once else 0.0
        self.started, self._is_full = now, is_full

    def count_call(self) -> None:
        """Count a TBE call."""
        self._calls += 1

    def is_overdue(self) -> bool:
        """Whether this backlog has been answered for longer than `max_busy_ms`."""
        return self._calls >= _MIN_CALLS and 1e3 * (perf_counter() - self._since) > self._max_busy_ms

    def end_handover(self) -> None:
        """Note that all requests of the handover have their outcomes."""
        self._ended = perf_counter()


# Asking Triton whether a request is cancelled takes as long as a small lookup. If requests may have waited for longer
# than _LONG_WAIT_S, about _CANCEL_PROBES of each group are checked, and the whole group if one of them is cancelled.
_LONG_WAIT_S = 0.05
_CANCEL_PROBES = 4
# The bits of FP16's infinities.
_INFINITY, _MINUS_INFINITY = 0x7C00, 0xFC00

T = TypeVar("T")


class Answerer:
    """Answers requests by an engine, within limits. It counts answers, and captures some requests.

    Args:
        engine: looks requests up.
        limits: how large a request and a TBE call may be, and how long a backlog is answered.
        metrics: counts requests and their outcomes.
        recorder: captures slow and refused requests. None: none are captured.
        log: called with the trace of an unexpected error. Callers get a fixed text.
        say_refused: called with the reason for each request that was refused as invalid.
        largest_handover: largest number of requests that Triton hands over together.
        spans: makes spans. None: none are made.
        say_shed: called with the reason for load shedding, and the number of refused requests.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        metrics: LookupMetrics,
        recorder: Recorder | None,
        log: Callable[[str], None],
        say_refused: Callable[[str], None],
        largest_handover: int = LARGEST_HANDOVER,
        spans: Spans | None = None,
        say_shed: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._recorder = recorder
        self._log, self._say_refused, self._say_shed, self._spans = log, say_refused, say_shed, spans
        self._backlog = Backlog(limits.max_busy_ms, largest_handover)

    def answer(
        self, requests: Sequence[T], decode: Callable[[T], Tensors], is_cancelled: Callable[[T], bool]
    ) -> list[Outcome]:
        """The outcome of each request: its outputs by name, or its own error.

        Args:
            requests: a handover; the requests may have any form.
            decode: the tensors of a request; may raise InvalidRequest.
            is_cancelled: whether the caller of a request has stopped waiting.
        """
        handover = _Handover(len(requests))
        self._backlog.start_handover(len(requests))
        # Newest first: under overload, the requests that are answered have waited only briefly.
        newest_first = range(len(requests))[::-1]
        for first in range(0, len(requests), self._limits.merged_requests):
            positions: Sequence[int] = newest_first[first : first + self._limits.merged_requests]
            if self._backlog.is_overdue():
                self._shed(handover, positions)
                continue
            if self._backlog.waited_s >= _LONG_WAIT_S:
                positions = self._drop_cancelled(
                    handover, positions, lambda position: is_cancelled(requests[position])
                )
            started = perf_counter()
            members = [
                position for position in positions if self._accept(handover, position, requests[position], decode)
            ]
            for indices in grouped([handover.accepted[member] for member in members], self._limits):
                group = [members[index] for index in indices]
                if self._backlog.is_overdue():
                    self._shed(handover, group)
                else:
                    self._answer_group(handover, group, started)
                started = perf_counter()
        self._backlog.end_handover()
        return handover.finish()

    def _shed(self, handover: "_Handover", positions: Sequence[int]) -> None:
        """Shed load: refuse requests that would be answered too late."""
        self._metrics.count_shed(len(positions))
        error = ServerUnavailable(
            f"busy: {len(handover.outcomes)} requests or more waited, "
            f"which is more than {self._limits.max_busy_ms} ms of work: try again later"
        )
        self._say_shed(str(error), len(positions))
        for position in positions:
            handover.outcomes[position] = error

    def _drop_cancelled(
        self, handover: "_Handover", positions: Sequence[int], is_cancelled: Callable[[int], bool]
    ) -> Sequence[int]:
        """Return the requests whose callers still wait. If one deadline has passed, most others have passed too."""
        if not any(map(is_cancelled, positions[:: max(1, len(positions) // _CANCEL_PROBES)])):
            return positions
        cancelled = set(filter(is_cancelled, positions))
        self._metrics.count_cancelled(len(cancelled))
        for position in cancelled:
            handover.outcomes[position] = RequestCancelled("the caller no longer waits for the answer")
        return [position for position in positions if position not in cancelled]

    def _accept(self, handover: "_Handover", position: int, request: T, decode: Callable[[T], Tensors]) -> bool:
        """Decode and check a request. Returns whether it was accepted."""
        try:
            tensors = decode(request)
            check_bundle(self._engine.bundle, tensors)
            if tensors.every_host:
                self._engine.ranks.check()
            handover.tensors[position] = tensors
            handover.accepted[position] = accept(self._engine.schema, tensors, self._limits)
        except InvalidRequest as error:
            self._count_refused(error)
            handover.outcomes[position] = error
            self._record(handover, position, f"refused: {error.reason.value}")
        except (ModelNotFound, HostUnavailable) as error:
            handover.outcomes[position] = error
        except Exception:
            self._fail(handover, [position])
        is_accepted = position in handover.accepted
        if not is_accepted and position in handover.tensors:
            self._end_spans(self._begin_spans(handover, [position]), [], [handover.outcomes[position]])
        return is_accepted

    def _answer_group(self, handover: "_Handover", group: list[int], started: float) -> None:
        """Answer the requests at the positions `group` with one TBE call, plus calls for their sequences."""
        self._backlog.count_call()
        spans = self._begin_spans(handover, group)
        try:
            answer = self._engine.answer([handover.accepted[position] for position in group])
            outcomes = answer.outcomes()
            for position, outcome in zip(group, outcomes, strict=True):
                handover.outcomes[position] = outcome
            seconds = self._count(answer, outcomes, started)
        except Exception:
            if len(group) == 1:
                self._fail(handover, group)
                self._end_spans(spans, [], [handover.outcomes[position] for position in group])
                return
        else:
            self._end_spans(spans, [started, *answer.times], outcomes)
            self._capture(handover, group, seconds)
            return
        for position in group:  # one request may have caused the error: the others are answered alone
            self._answer_group(handover, [position], perf_counter())

    def _count(self, answer: GroupAnswer, outcomes: Sequence[Outcome], started: float) -> float:
        """Count the outcomes of a group. Returns how long it took, in seconds."""
        metrics = self._metrics
        metrics.count_ids_outside(answer.ids_outside)
        lost = 0
        for error in answer.errors.values():
            if isinstance(error, InvalidRequest):
                self._count_refused(error)
            else:
                lost += 1
        if not answer.validated.requests:
            return 0.0
        if any(_overflows(batch.embeddings) for batch in answer.answers):
            outputs = [outcome for outcome in outcomes if not isinstance(outcome, ServingError)]
            metrics.count_overflows(sum(any(map(_overflows, output.values())) for output in outputs))
        metrics.count_lost(lost, zeroed_of(answer.answers))
        times = [started, *answer.times, perf_counter()]
        metrics.count_call(answer.validated, self._backlog.started, times)
        return times[-1] - started

    def _capture(self, handover: "_Handover", group: Sequence[int], seconds: float) -> None:
        """Capture the refused requests of a group, and all of its requests if the group was slow."""
        if self._recorder is None:
            return
        is_slow = self._recorder.is_slow(seconds)
        for position in group:
            outcome = handover.outcomes[position]
            if isinstance(outcome, InvalidRequest):
                self._record(handover, position, f"refused: {outcome.reason.value}")
            elif is_slow and handover.accepted[position].samples:  # `tbe-serve run` sends requests without samples
                self._record(handover, position, f"slow: {1e3 * seconds:.1f} ms")

    def _begin_spans(self, handover: "_Handover", group: Sequence[int]) -> list[Any]:
        if self._spans is None:
            return []
        return self._spans.begin([handover.tensors[position] for position in group], self._backlog.started)

    def _end_spans(self, begun: list[Any], times: Sequence[float], outcomes: Sequence[Outcome]) -> None:
        if self._spans is not None:
            hosts = self._engine.ranks.host_times
            self._spans.end(begun, self._backlog.started, [*times, perf_counter()], hosts, outcomes)

    def _count_refused(self, error: InvalidRequest) -> None:
        self._metrics.count_invalid(error)
        self._say_refused(str(error))

    def _fail(self, handover: "_Handover", group: Sequence[int]) -> None:
        """Handle an unexpected error, inside `except`: log the trace, and give each caller a fixed text."""
        tensors = [handover.tensors[position] for position in group if position in handover.tensors]
        traces = "".join(f" {tensor.trace}" for tensor in tensors if tensor.trace)
        self._log(f"lookup failed{traces}: {traceback.format_exc()}")
        self._metrics.count_failed(len(group))
        for position in group:
            handover.outcomes[position] = InternalError("lookup failed: the server's log says why")

    def _record(self, handover: "_Handover", position: int, why: str) -> None:
        """Capture a request, if it could be decoded."""
        tensors = handover.tensors.get(position)
        if self._recorder is not None and tensors is not None:
            self._recorder.record(tensors, why)


def _overflows(embeddings: Array) -> bool:
    """Whether an output is float16 and one of its numbers is not finite."""
    if embeddings.dtype != np.float16 or not embeddings.size:
        return False
    # The bits of numbers that are not finite are larger than all others: positive ones as int16, negative ones as
    # uint16. numpy's `isinf` takes 50 times as long.
    return bool(embeddings.view(np.int16).max() >= _INFINITY or embeddings.view(np.uint16).max() >= _MINUS_INFINITY)


class _Handover:
    """The requests that Triton hands over together: their tensors and outcomes, by position."""

    def __init__(self, requests: int) -> None:
        self.outcomes: list[Outcome] = [InternalError("not answered")] * requests
        self.tensors: dict[int, Tensors] = {}
        self.accepted: dict[int, KjtRequest] = {}

    def finish(self) -> list[Outcome]:
        """Return the outcomes, and keep no reference to them.

        Errors refer to the frames that they passed, and these refer to this object. A reference back would keep all
        arrays of the handover until the garbage collector runs, which counts objects, not bytes.
        """
        outcomes, self.outcomes = self.outcomes, []
        return outcomes
