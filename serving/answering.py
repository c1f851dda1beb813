"""Requests that wait together, answered with as few TBE calls as the limits allow: each with its own outcome."""

import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from serving import kjt
from serving.capture import Recorder
from serving.engine import Engine
from serving.errors import InvalidRequest, ServerFault, ServingError
from serving.kjt import Embeddings, KjtRequest, Limits, Tensors
from serving.metrics import LookupMetrics

T = TypeVar("T")
Outcome = Embeddings | ServingError


class Answerer:
    """An engine behind its limits, counted and perhaps captured.

    Args:
        engine: answers.
        limits: ids and samples of a request and of a call.
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

    def answer(self, requests: Sequence[T], decode: Callable[[T], Tensors]) -> list[Outcome]:
        """The embeddings [B, D] of each request, or its own error.

        Args:
            requests: in any form.
            decode: the tensors of one; may raise InvalidRequest.
        """
        call = _Call(len(requests))
        started = perf_counter()
        for position, request in enumerate(requests):
            try:
                tensors = decode(request)
                call.tensors[position] = tensors
                call.accepted[position] = kjt.accept(self._engine.schema, tensors, self._limits)
            except InvalidRequest as error:
                self._refuse(call, position, error)
            except Exception:
                self._fail(call, [position])
        positions = list(call.accepted)
        for group in kjt.grouped(list(call.accepted.values()), self._limits):
            self._answer_group(call, [positions[index] for index in group], started)
            started = perf_counter()
        return call.outcomes

    def _answer_group(self, call: "_Call", group: list[int], started: float) -> None:
        """One TBE call."""
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
            for position, answer in zip(group, kjt.split(embeddings, batch), strict=True):
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


class _Call:
    """What is known of requests that were handed over together, by position."""

    def __init__(self, requests: int) -> None:
        self.outcomes: list[Outcome] = [ServerFault("not answered")] * requests
        self.tensors: dict[int, Tensors] = {}
        self.accepted: dict[int, KjtRequest] = {}
