"""The requests that Triton hands over together, answered with as few TBE calls as the limits allow.

Load is shed here: requests that a backlog leaves unanswered for too long are refused, mostly before they are decoded.
Triton's own limits of a queue stall an idle model (docs/decisions/0009).
"""

import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

import numpy as np

from serving.backend.backlog import Backlog
from serving.backend.metrics import LookupMetrics
from serving.backend.recorder import Recorder
from serving.bundle.opening import Bundle
from serving.engine import Engine
from serving.errors import (
    HostUnavailable,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    ServerUnavailable,
    ServingError,
)
from serving.model.settings import LARGEST_HANDOVER
from serving.ranks.answered import failed_of, zeroed_of
from serving.request import kjt
from serving.request.accept import accept
from serving.request.batches import batches_of, outputs_of
from serving.request.limits import Limits, grouped
from serving.request.tensors import Array, KjtRequest, Outputs, Tensors

# To learn from Triton whether a request is cancelled takes as long as a small lookup. Where requests may have waited
# for longer than this, about so many of each group are looked at, and the whole group if one of them is cancelled.
_LONG_WAIT_S = 0.05
_LOOKED_AT = 4
# The bits of FP16's infinities.
_INFINITY, _MINUS_INFINITY = 0x7C00, 0xFC00

T = TypeVar("T")
Outcome = Outputs | ServingError


class Answerer:
    """An engine behind limits. Its answers are counted, and some requests are captured.

    Args:
        engine: answers.
        limits: how large a request and a TBE call may be, and how long a backlog is answered.
        metrics: counts.
        recorder: keeps slow and refused requests; None keeps none.
        log: takes the trace of an unexpected error. Callers get a fixed text.
        largest_handover: most requests that Triton hands over together.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        metrics: LookupMetrics,
        recorder: Recorder | None,
        log: Callable[[str], None],
        largest_handover: int = LARGEST_HANDOVER,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._recorder = recorder
        self._log = log
        self._backlog = Backlog(limits.max_busy_ms, largest_handover)

    def answer(
        self, requests: Sequence[T], decode: Callable[[T], Tensors], is_cancelled: Callable[[T], bool]
    ) -> list[Outcome]:
        """The outcome of each request: its outputs by name, or its own error.

        Args:
            requests: a handover; the requests may have any form.
            decode: the tensors of a request; may raise InvalidRequest.
            is_cancelled: whether nobody waits for the answer to a request any more.
        """
        handover = _Handover(len(requests))
        self._backlog.start_handover(len(requests))
        # Newest first: under overload, those that are answered have waited for a short time.
        newest_first = range(len(requests))[::-1]
        for first in range(0, len(requests), self._limits.merged_requests):
            positions: Sequence[int] = newest_first[first : first + self._limits.merged_requests]
            if self._backlog.is_overdue():
                self._shed(handover, positions)
                continue
            positions = self._drop_cancelled(handover, positions, lambda each: is_cancelled(requests[each]))
            started = perf_counter()
            members = [each for each in positions if self._accept(handover, each, requests[each], decode)]
            for indices in grouped([handover.accepted[each] for each in members], self._limits):
                group = [members[index] for index in indices]
                if self._backlog.is_overdue():
                    self._shed(handover, group)
                else:
                    self._answer_group(handover, group, started)
                started = perf_counter()
        self._backlog.end_handover()
        return handover.finish()

    def _shed(self, handover: "_Handover", positions: Sequence[int]) -> None:
        """Load shedding: refuse requests that would be answered too late."""
        self._metrics.count_shed(len(positions))
        error = ServerUnavailable(
            f"busy: {len(handover.outcomes)} requests or more waited, "
            f"which is more than {self._limits.max_busy_ms} ms of work: try again later"
        )
        for position in positions:
            handover.outcomes[position] = error

    def _drop_cancelled(
        self, handover: "_Handover", positions: Sequence[int], is_cancelled: Callable[[int], bool]
    ) -> Sequence[int]:
        """The requests whose callers still wait. Where one deadline has passed, others mostly have, too."""
        if self._backlog.waited_s < _LONG_WAIT_S:
            return positions
        if not any(map(is_cancelled, positions[:: max(1, len(positions) // _LOOKED_AT)])):
            return positions
        cancelled = set(filter(is_cancelled, positions))
        self._metrics.count_cancelled(len(cancelled))
        for position in cancelled:
            handover.outcomes[position] = RequestCancelled("nobody waits for the answer any more")
        return [position for position in positions if position not in cancelled]

    def _accept(self, handover: "_Handover", position: int, request: T, decode: Callable[[T], Tensors]) -> bool:
        """Decode a request. False if it was refused."""
        try:
            tensors = decode(request)
            check_bundle(self._engine.bundle, tensors)
            if tensors.every_host:
                self._engine.ranks.check()
            handover.tensors[position] = tensors
            handover.accepted[position] = accept(self._engine.schema, tensors, self._limits)
        except InvalidRequest as error:
            self._refuse(handover, position, error)
        except (ModelNotFound, HostUnavailable) as error:
            handover.outcomes[position] = error
        except Exception:
            self._fail(handover, [position])
        return position in handover.accepted

    def _answer_group(self, handover: "_Handover", group: list[int], started: float) -> None:
        """Answer the requests at the positions `group` with one TBE call, and others for their sequences."""
        self._backlog.count_call()
        try:
            try:
                checked = kjt.check([handover.accepted[position] for position in group])
            except InvalidRequest:
                group = [position for position in group if self._apply_id_policies(handover, position)]
                if not group:
                    return
                checked = kjt.check([handover.accepted[position] for position in group])
            times = [started, perf_counter()]
            batches = batches_of(self._engine.schema, checked)
            times.append(perf_counter())
            answered = self._engine.run(batches)
            times.append(perf_counter())
            found = [each.embeddings for each in answered]
            scores = self._engine.score_batch(batches, found)
            times.append(perf_counter())
            outputs = outputs_of(checked, batches, found)
            if any(map(_overflows, found)):
                self._metrics.count_overflows(sum(any(map(_overflows, each.values())) for each in outputs))
            failed = failed_of(answered)
            for index, (position, each) in enumerate(zip(group, outputs, strict=True)):
                handover.outcomes[position] = failed.get(index, {**each, **scores.get(index, {})})
            self._metrics.count_lost(len(failed), zeroed_of(answered))
            times.append(perf_counter())
            self._metrics.count_call(checked, times)
        except Exception:
            if len(group) == 1:
                self._fail(handover, group)
                return
        else:
            if self._recorder is not None and self._recorder.is_slow(times[-1] - started):
                for position in group:
                    if handover.accepted[position].samples:  # one without is a canary
                        self._record(handover, position, f"slow: {1e3 * (times[-1] - started):.1f} ms")
            return
        for position in group:  # a single request may be to blame: none of the others fails with it
            self._answer_group(handover, [position], perf_counter())

    def _apply_id_policies(self, handover: "_Handover", position: int) -> bool:
        """Do what the tables' id policies say to one request. False if it was refused."""
        try:
            handover.accepted[position], outside = kjt.apply_id_policies(handover.accepted[position])
        except InvalidRequest as error:
            self._refuse(handover, position, error)
            return False
        self._metrics.count_ids_outside(outside)
        return True

    def _refuse(self, handover: "_Handover", position: int, error: InvalidRequest) -> None:
        self._metrics.count_invalid(error)
        handover.outcomes[position] = error
        self._record(handover, position, f"refused: {error.reason.value}")

    def _fail(self, handover: "_Handover", group: Sequence[int]) -> None:
        """Answer an unexpected error, inside `except`: the log gets the trace, each caller a fixed text."""
        tensors = [handover.tensors[position] for position in group if position in handover.tensors]
        traces = "".join(f" {each.trace}" for each in tensors if each.trace)
        self._log(f"lookup failed{traces}: {traceback.format_exc()}")
        self._metrics.count_failed(len(group))
        for position in group:
            handover.outcomes[position] = InternalError("lookup failed: the server's log says why")

    def _record(self, handover: "_Handover", position: int, why: str) -> None:
        """Capture a request, if it could be decoded."""
        tensors = handover.tensors.get(position)
        if self._recorder is not None and tensors is not None:
            self._recorder.record(tensors, why)


def check_bundle(bundle: Bundle, tensors: Tensors) -> None:
    """Refuse a request that another bundle has to answer.

    Raises:
        ModelNotFound: naming what was expected.
    """
    this = f"{bundle.path.parent.name} version {bundle.path.name}"
    if tensors.bundle is not None and tensors.bundle != bundle.digest:
        raise ModelNotFound(
            f"expected the bundle with SHA-256 {tensors.bundle[:64]} of its manifest, this is {bundle.digest}: {this}"
        )
    part = bundle.manifest.part_of
    if tensors.part_of is not None and (part is None or tensors.part_of != part.text):
        what = "no part of a plan" if part is None else f"part {part.text}"
        raise ModelNotFound(f"expected part {tensors.part_of[:100]} (plan/host), this is {what}: {this}")


def _overflows(embeddings: Array) -> bool:
    """Whether an output is float16 and one of its numbers is not finite."""
    if embeddings.dtype != np.float16 or not embeddings.size:
        return False
    # By their bits, numbers that are not finite come after all others: as int16 above zero, as uint16 below zero.
    # numpy's `isinf` takes 50 times as long.
    return bool(embeddings.view(np.int16).max() >= _INFINITY or embeddings.view(np.uint16).max() >= _MINUS_INFINITY)


class _Handover:
    """Requests that Triton hands over together: what is known of each, by position."""

    def __init__(self, requests: int) -> None:
        self.outcomes: list[Outcome] = [InternalError("not answered")] * requests
        self.tensors: dict[int, Tensors] = {}
        self.accepted: dict[int, KjtRequest] = {}

    def finish(self) -> list[Outcome]:
        """The outcomes, which this then no longer has.

        Errors hold the frames that they went through, and those hold this. If this held them, too, all arrays of the
        handover would stay until the garbage collector came by, which counts objects and not bytes.
        """
        outcomes, self.outcomes = self.outcomes, []
        return outcomes
