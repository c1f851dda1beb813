"""Requests that wait together, answered with as few TBE calls as the limits allow: each with its own outcome.

Triton hands over all that wait; its own limits of a queue stall (docs/decisions/0009). So under more load than there
is capacity it is here that some are refused: what was not answered in time, before it is looked at.
"""

import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import numpy as np

from serving import kjt
from serving.capture import Recorder
from serving.engine import Engine
from serving.errors import InvalidRequest, RequestCancelled, ServerFault, ServerUnavailable, ServingError
from serving.kjt import Embeddings, KjtRequest, Limits, Tensors
from serving.metrics import LookupMetrics

# However long they take, so many TBE calls are made: large requests are not overload.
_LEAST_CALLS = 4
# Where requests wait, Triton hands over the next within this; more than it takes to copy 256 of them.
_AT_ONCE_S = 0.05
# To ask Triton whether a caller has gone takes as long as a small lookup: of those that may have waited long some are
# asked for, and all where one of these has gone.
_LONG_S = 0.05
_ASKED_FOR = 4
# The bits of FP16's infinities.
_INFINITY, _MINUS_INFINITY = 0x7C00, 0xFC00

T = TypeVar("T")
Outcome = Embeddings | ServingError


class Answerer:
    """An engine behind its limits, counted and perhaps captured.

    Args:
        engine: answers.
        limits: of a request, of a call, and of all that wait together.
        metrics: count.
        recorder: keeps slow and refused requests; None keeps none.
        log: takes the trace of what no check foresaw; callers get a fixed text.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        metrics: LookupMetrics,
        recorder: Recorder | None,
        log: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._recorder = recorder
        self._log = log
        self._backlog = _Backlog()

    def answer(
        self, requests: Sequence[T], decode: Callable[[T], Tensors], is_gone: Callable[[T], bool]
    ) -> list[Outcome]:
        """The embeddings [B, D] of each request, or its own error.

        Args:
            requests: in any form.
            decode: the tensors of one; may raise InvalidRequest.
            is_gone: whether nobody waits for the answer to one any more.
        """
        call = _Call(len(requests))
        self._backlog.meet(len(requests) >= self._limits.waiting_requests)
        # Where some have to be refused, those that waited longest: whoever is answered was answered soon.
        newest_first = range(len(requests))[::-1]
        for first in range(0, len(requests), self._limits.merged_requests):
            positions = newest_first[first : first + self._limits.merged_requests]
            if self._is_overdue():
                self._turn_away(call, positions)
                continue
            wanted = self._wanted(call, positions, lambda each: is_gone(requests[each]))
            started = perf_counter()
            members = [each for each in wanted if self._accept(call, each, requests[each], decode)]
            for indices in kjt.grouped([call.accepted[each] for each in members], self._limits):
                group = [members[index] for index in indices]
                if self._is_overdue():
                    self._turn_away(call, group)
                else:
                    self._answer_group(call, group, started)
                started = perf_counter()
        self._backlog.leave()
        return call.outcomes

    def _accept(self, call: "_Call", position: int, request: T, decode: Callable[[T], Tensors]) -> bool:
        """Whether a request has a form that can be answered."""
        try:
            tensors = decode(request)
            call.tensors[position] = tensors
            call.accepted[position] = kjt.accept(self._engine.schema, tensors, self._limits)
        except InvalidRequest as error:
            self._refuse(call, position, error)
        except Exception:
            self._fail(call, [position])
        return position in call.accepted

    def _wanted(self, call: "_Call", positions: Sequence[int], is_gone: Callable[[int], bool]) -> Sequence[int]:
        """Those whose callers still wait: a deadline that passes while many do passes for many."""
        if self._backlog.waited_s < _LONG_S:
            return positions
        if not any(map(is_gone, positions[:: max(1, len(positions) // _ASKED_FOR)])):
            return positions
        gone = set(filter(is_gone, positions))
        self._metrics.gone(len(gone))
        for position in gone:
            call.outcomes[position] = RequestCancelled("nobody waits for the answer any more")
        return [position for position in positions if position not in gone]

    def _is_overdue(self) -> bool:
        backlog = self._backlog
        return backlog.calls >= _LEAST_CALLS and 1e3 * (perf_counter() - backlog.since) > self._limits.busy_ms

    def _turn_away(self, call: "_Call", positions: Sequence[int]) -> None:
        """Refuse requests that would be answered too late, unseen."""
        self._metrics.turned_away(len(positions))
        error = ServerUnavailable(
            f"busy: {len(call.outcomes)} requests or more waited, which is more than {self._limits.busy_ms} ms of "
            "work: try again later"
        )
        for position in positions:
            call.outcomes[position] = error

    def _answer_group(self, call: "_Call", group: list[int], started: float) -> None:
        """One TBE call."""
        self._backlog.calls += 1
        try:
            try:
                checked = kjt.check([call.accepted[position] for position in group])
            except InvalidRequest:
                group = [position for position in group if self._mend(call, position)]
                if not group:
                    return
                checked = kjt.check([call.accepted[position] for position in group])
            times = [started, perf_counter()]
            batch = kjt.merge(self._engine.schema, checked)
            times.append(perf_counter())
            embeddings = self._engine.run(batch)
            times.append(perf_counter())
            answers = kjt.split(embeddings, batch)
            if _overflows(embeddings):
                self._metrics.overflowed(sum(map(_overflows, answers)))
            for position, answer in zip(group, answers, strict=True):
                call.outcomes[position] = answer
            times.append(perf_counter())
            self._metrics.answered(checked, times)
        except Exception:
            self._fail(call, group)
            return
        if self._recorder is not None and self._recorder.is_slow(times[-1] - started):
            for position in group:
                self._record(call, position, f"slow: {1e3 * (times[-1] - started):.1f} ms")

    def _mend(self, call: "_Call", position: int) -> bool:
        """Do to one request what its tables' id policies say; whether it can be answered."""
        try:
            call.accepted[position], outside = kjt.mend(call.accepted[position])
        except InvalidRequest as error:
            self._refuse(call, position, error)
            return False
        self._metrics.outside(outside)
        return True

    def _refuse(self, call: "_Call", position: int, error: InvalidRequest) -> None:
        self._metrics.rejected(error)
        call.outcomes[position] = error
        self._record(call, position, f"refused: {error.reason.value}")

    def _fail(self, call: "_Call", group: Sequence[int]) -> None:
        """Inside `except`, for what no check foresaw: the log gets the trace, each caller a fixed text."""
        traces = [tensors.trace for position in group if (tensors := call.tensors.get(position)) and tensors.trace]
        self._log(f"lookup failed{' ' if traces else ''}{' '.join(traces)}: {traceback.format_exc()}")
        self._metrics.failed(len(group))
        for position in group:
            call.outcomes[position] = ServerFault("lookup failed: the server's log says why")

    def _record(self, call: "_Call", position: int, why: str) -> None:
        tensors = call.tensors.get(position)
        if self._recorder is not None and tensors is not None:
            self._recorder.record(tensors, why)


def _overflows(embeddings: Embeddings) -> bool:
    """Whether some of them are FP16 and not finite. Numpy's `isinf` takes fifty times as long."""
    if embeddings.dtype != np.float16 or not embeddings.size:
        return False
    # By their bits, what is not finite comes after all that is: as int16 above zero, as uint16 below.
    return bool(embeddings.view(np.int16).max() >= _INFINITY or embeddings.view(np.uint16).max() >= _MINUS_INFINITY)


class _Call:
    """What is known of requests that were handed over together, by position."""

    def __init__(self, requests: int) -> None:
        self.outcomes: list[Outcome] = [ServerFault("not answered")] * requests
        self.tensors: dict[int, Tensors] = {}
        self.accepted: dict[int, KjtRequest] = {}


class _Backlog:
    """Since when requests wait, and how many TBE calls were made for them.

    As many as Triton hands over together may not be all that wait: where it does so again at once, the same backlog
    is worked on.
    """

    def __init__(self) -> None:
        self.since = self._met = self._left = 0.0
        self.calls = 0
        # How long they may have waited.
        self.waited_s = 0.0
        self._is_full = False

    def meet(self, is_full: bool) -> None:
        """Requests were handed over; as many as may be, where `is_full`."""
        now = perf_counter()
        at_once = now - self._left < _AT_ONCE_S
        if not (self._is_full and is_full and at_once):
            self.since, self.calls = now, 0
        # While the last ones were answered; and Triton may have had two handovers ready.
        self.waited_s = self._left - self._met + self.waited_s / 2 if at_once else 0.0
        self._met, self._is_full = now, is_full

    def leave(self) -> None:
        """They have their outcomes."""
        self._left = perf_counter()
