"""Supervise a tritonserver: keep its models serving, start it again when it dies, replace it when its certificate is
renewed, and drain and stop it on a signal."""

import math
import signal
import threading
import time

from serving.errors import ServingError
from serving.server.draining import Drain
from serving.server.model_watcher import ModelWatcher
from serving.server.ports import Gate
from serving.server.releases import ReleaseFollower
from serving.server.running_server import Served, Server
from serving.triton.stubs import living_stubs

MOST, WITHIN_S = 5, 600.0


class Restarts:
    """Decides whether and when a server is started again: at most MOST times within WITHIN_S.

    The pause is 0 s if the last server came to serve. Otherwise it is 1, 3, 7, 15 s.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._failed = 0

    @property
    def recent(self) -> int:
        """Restarts within the last WITHIN_S."""
        return len(self._times)

    def next_pause_s(self, *, has_served: bool) -> float | None:
        """Count a restart. Returns the seconds to wait before it. None: there were MOST already, so do not restart.

        Args:
            has_served: whether the server that died had loaded its models.
        """
        now = time.monotonic()
        self._times = [each for each in self._times if now - each < WITHIN_S]
        if len(self._times) >= MOST:
            return None
        self._times.append(now)
        self._failed = 0 if has_served else self._failed + 1
        return 2.0**self._failed - 1


_PERIOD_S, _ASK_TIMEOUT_S = 0.25, 10.0
# Seconds from when its models are idle until a stopping server is killed: it has to send its last answers, and end.
_LAST_ANSWERS_S = 3.0
# Seconds between two looks at certificates, until what failed is tried again, until connections that began before
# another process got them have reached theirs, and until these are accepted on a busy machine.
_LOOKS_S, _AGAIN_S, _REACHED_S, _ACCEPTED_S = 2.0, 60.0, 2.0, 30.0
_MISFITS = 5  # looks at which certificate and key do not fit, until the log says so
_FAILED = "cannot go over to the renewed certificates, and goes on with those before"


class _Renewal:
    """Goes over to certificates that are renewed: tritonserver reads them as it starts, and not again.

    A second process starts beside the present one, and takes its place when it serves the same. New connections come
    to it then, and the one before ends when its last connection has.
    """

    def __init__(self, server: Server, served: Served, recover: bool) -> None:
        self._server, self._served, self._recover = server, served, recover
        self._next_look = 0.0
        # The digest of the files when they were last looked at, and of those that the log says do not fit.
        self._seen, self._refused = server.read, b"-"
        self._misfits = 0
        self._second: tuple[Server, ModelWatcher, Served] | None = None
        self._before: Server | None = None
        self._ending: threading.Thread | None = None
        # Until when the process before may have connections, and until when not all are known that it has.
        self._until = self._unknown_until = 0.0

    def step(self, watcher: ModelWatcher) -> ModelWatcher:
        """Do what is due. Returns the watcher of the process that serves, of which `watcher` is the present one."""
        now, gate = time.monotonic(), self._server.gate
        if gate is None:
            return watcher
        if self._before is not None:
            self._end_before(self._before, gate, now)
        elif self._second is not None:
            return self._step_second(*self._second, watcher)
        elif now >= self._next_look and watcher.has_loaded:
            self._next_look = now + _LOOKS_S
            if self._is_due():
                self._server.log.info("certificates were renewed: starts another", extra={"event": "renewing"})
                second, served = self._server.beside(), self._served.copy()
                self._second = second, ModelWatcher(second, served, self._recover), served
                self._second[1].start(is_anew=True, present=self._server)
        return watcher

    def signal(self, number: int) -> None:
        """Send a signal to the process before, if there is one."""
        if self._before is not None:
            self._before.signal(number)

    def stop_looking(self) -> None:
        """Look for no further renewal, and end a second process that is not ready yet."""
        self._next_look = math.inf
        self._end_second()

    @property
    def processes(self) -> list[int]:
        """Those that may have connections of clients: the present one, and that before it."""
        return [each.process.pid for each in (self._server, self._before) if each is not None]

    def end(self) -> None:
        """End the processes beside the present one. That before it answers what it has."""
        self._end_second()
        if self._ending is not None:
            self._ending.join()
        elif self._before is not None:
            self._before.end()
        self._before = self._ending = None

    def _end_second(self) -> None:
        if self._second is not None:
            second, watcher, _ = self._second
            watcher.end()
            second.process.kill()
            second.end()
        self._second = None

    def _is_due(self) -> bool:
        """Whether files are there that were not read, that fit, and that have not changed since the last look."""
        before, self._seen = self._seen, self._server.digest()
        if self._seen != before:
            self._misfits = 0
            return False
        if self._seen in (self._server.read, self._refused):
            return False
        try:
            self._server.expect_usable()
            problem = ""
        except ServingError as error:
            problem = str(error)
        self._misfits += 1
        if problem and self._misfits == _MISFITS:  # else the rest of them is still to come
            self._say_failed(problem)
            self._refused = self._seen
        return not problem

    def _say_failed(self, problem: object) -> None:
        self._server.log.error(f"{_FAILED}: %s", problem, extra={"event": "renewal_failed"})

    def _step_second(self, second: Server, its: ModelWatcher, served: Served, watcher: ModelWatcher) -> ModelWatcher:
        problem: object = its.lost or its.failure
        if (code := second.process.poll()) is not None:
            problem = second.child.why(code)
        if problem is None and its.has_loaded:
            try:
                self._before = self._server.take(second)
            except OSError as error:  # the present one has ended, and the next reads them
                problem = error
            else:
                watcher.end()
                self._served.configs, self._served.versions = served.configs, served.versions
                its.take_over()
                self._second = None
                self._unknown_until = time.monotonic() + _REACHED_S
                self._until = time.monotonic() + self._server.connection_age_s + _ACCEPTED_S
                self._server.log.info("serves with the renewed certificates", extra={"event": "renewed"})
                return its
        if problem is not None:
            self._say_failed(problem)
            self._next_look = time.monotonic() + _AGAIN_S
            self.end()
        return watcher

    def _end_before(self, before: Server, gate: Gate, now: float) -> None:
        if self._ending is None and now > self._unknown_until:
            has_connections = gate.has_connections(before.process.pid)
            if not has_connections:
                before.exit_timeout_s = _LAST_ANSWERS_S  # nobody waits for one
            if not has_connections or now > self._until:
                self._ending = threading.Thread(target=before.end, name="process before", daemon=True)
                self._ending.start()
        elif self._ending is not None and not self._ending.is_alive():
            gate.settle()
            self._before = self._ending = None


class Supervisor:
    """Watches a server from one thread, and never blocks it for long: on the main one, signals are handled at once.

    Args:
        server: a running server.
        recover: whether to load models again that die or hang, and to start the server again if it dies.
        follower: follows the models' release files while the server runs. None: do not follow them.

    Raises:
        ServingError: the server does not say which models it serves.
    """

    def __init__(self, server: Server, recover: bool, follower: ReleaseFollower | None = None) -> None:
        self._server, self._log = server, server.log
        self._recover = recover
        self._follower = follower
        self._served = Served(server.started)
        control = server.control(_ASK_TIMEOUT_S)
        self._served.update(control.index(), control)
        self._restarts = Restarts()
        # Whether the last tritonserver that ended had loaded its models.
        self._has_served = False
        self._failure: ServingError | None = None
        self._renewal = _Renewal(server, self._served, recover)
        self._drain: Drain | None = None
        # The signal that the server is stopped by, and that which ends it at once.
        self._number: int = signal.SIGTERM
        self._killed_by: int | None = None
        self._stopping = False
        # Whether no model was answering at the last check, while stopping.
        self._is_idle = False

    def stop(self, number: int) -> None:
        """Stop by signal `number`: drain if the server is to, then answer what it accepted. The second time: at once.

        It may be called by the handler of a signal, so it waits for nothing.
        """
        if self._stopping or self._drain is not None:
            self._kill(number)
        elif self._server.drain_s and self._server.condition.server is None:
            self._number = number
            self._drain = Drain(self._server.drain_s, self._server.gate, time.monotonic())
            self._server.condition.is_draining = True
            if self._follower is not None:
                self._follower.end()
            line = "drains for up to %g s: not ready, and still answers; once more ends it at once"
            self._log.info(line, self._server.drain_s, extra={"event": "draining"})
        else:
            self._stop(number)

    def _kill(self, number: int) -> None:
        """End it at once. Requests that it accepted are lost."""
        self._stopping = self._server.condition.is_stopping = True
        self._killed_by = number
        self._server.signal(signal.SIGKILL)
        self._renewal.signal(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        """Send a signal to the server. It answers the requests that it accepted, and ends."""
        self._stopping = self._server.condition.is_stopping = True
        self._is_idle = not self._is_answering()
        if self._follower is not None:
            self._follower.end()
        self._server.signal(number)
        self._renewal.signal(number)
        # Last: a log that nobody reads may hold up whoever writes to it.
        self._log.info("stops: what was accepted is answered", extra={"event": "stopping"})

    def wait(self) -> int:
        """Watch until the server has ended and is not started again. Returns its exit code, or less than 0: a signal.

        If a server crashes while it stops, and no request was left, the exit code is 0. Triton 2.51 sometimes does so
        after many clients gave up.

        Raises:
            ServingError: a model's process died or hangs, and was not replaced.
        """
        if self._follower is not None:
            self._follower.start()
        code = self._watch(is_anew=False)
        while code and self._recover and not self._is_told_to_stop and self._start_anew(code):
            code = self._watch(is_anew=True)
        if self._failure is not None:
            raise self._failure
        if self._killed_by is not None:
            self._log.warning("stopped at once: what was accepted is lost", extra={"event": "stopped"})
            return -self._killed_by
        code = self._code_of_stop(code)
        if code:
            self._log.critical("tritonserver exited with %d", code, extra={"event": "exited"})
        else:
            self._log.info("stopped", extra={"event": "stopped"})
        return code

    @property
    def _is_told_to_stop(self) -> bool:
        return self._stopping or self._drain is not None

    def _code_of_stop(self, code: int) -> int:
        """The exit code, of which a crash takes nothing if nothing was left to answer."""
        if self._stopping and code < 0 and self._is_idle:
            self._log.warning(
                "tritonserver ended with %s while it stopped, with nothing left to answer",
                signal.Signals(-code).name,
                extra={"event": "server_died"},
            )
            return 0
        return code

    def _is_answering(self) -> bool:
        return any(stub.is_busy() for stub in living_stubs(self._server.process.pid))

    def _watch(self, *, is_anew: bool) -> int:
        """Watch until this tritonserver has ended. Returns its exit code."""
        watcher = ModelWatcher(self._server, self._served, self._recover)
        watcher.start(is_anew=is_anew)
        while (code := self._server.process.poll()) is None and not self._stopping:
            self._server.condition.seen = time.monotonic()
            self._server.kept.restore()
            if watcher.failure is not None:
                self._failure = watcher.failure
                self._stop(signal.SIGTERM)
            elif watcher.lost is not None:
                self._log.error(
                    "tritonserver does not answer, and is killed: %s", watcher.lost, extra={"event": "server_hangs"}
                )
                self._server.process.kill()
                self._server.process.wait()
            else:
                watcher = self._renewal.step(watcher)
                if self._drain is not None and self._has_drained(self._drain):
                    self._stop(self._number)
                time.sleep(_PERIOD_S)
        watcher.end()
        self._has_served = watcher.has_loaded
        if code is None:
            code = self._await_end()
        else:  # the gate leads to the next process if it is alone
            self._renewal.signal(signal.SIGKILL)
        self._renewal.end()
        return code

    def _has_drained(self, drain: Drain) -> bool:
        """Whether the server has no connection any more, or has drained for long enough."""
        if self._server.run_file.drains_until is None:
            self._server.kept.note(drains_until=time.time() + drain.drain_s)
            self._renewal.stop_looking()
        return drain.is_over(self._renewal.processes)

    def _await_end(self) -> int:
        """Wait until a server that was told to stop has ended. Returns its exit code.

        Triton waits until its exit timeout for requests that it has lost, and for models whose process died. But if
        no model is busy, no request is left: Triton hands a queued request to an idle model at once. So the server is
        killed when its models have been idle for _LAST_ANSWERS_S.
        """
        idle_since = time.monotonic()
        deadline = idle_since + self._server.exit_timeout_s
        while (code := self._server.process.poll()) is None:
            now = self._server.condition.seen = time.monotonic()
            is_answering = self._is_answering()
            if is_answering:
                idle_since = now
            if self._server.process.poll() is None:  # else it had ended before we looked
                self._is_idle = not is_answering
            if now > min(deadline, idle_since + _LAST_ANSWERS_S):
                self._server.process.kill()
                return 0 if now < deadline else self._server.process.wait()
            time.sleep(_PERIOD_S)
        return code

    def _start_anew(self, code: int) -> bool:
        """Replace a server that died. False if too many died recently, or if a stop came before the new one."""
        reason = self._server.child.why(code)
        pause_s = self._restarts.next_pause_s(has_served=self._has_served)
        if pause_s is None:
            self._log.critical(
                "tritonserver died again (%s), after %d starts within %g minutes",
                reason,
                MOST,
                WITHIN_S / 60,
                extra={"event": "server_died"},
            )
            return False
        self._server.condition.server = f"tritonserver died ({reason}); it is started anew"
        self._server.condition.models.clear()
        self._server.note_recovery(None, f"tritonserver died ({reason})")
        pause = f", in {pause_s:g} s" if pause_s else ""
        count = f"{self._restarts.recent} of at most {MOST} times"
        self._log.error(
            "tritonserver died (%s); starting it anew, %s%s", reason, count, pause, extra={"event": "server_died"}
        )
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._is_told_to_stop:
            self._server.condition.seen = time.monotonic()
            time.sleep(_PERIOD_S)
        if not self._is_told_to_stop:
            self._server.start_anew()
        if self._stopping:  # the signal came before the new server could get it
            self._server.signal(signal.SIGTERM if self._killed_by is None else signal.SIGKILL)
        return not self._is_told_to_stop or self._server.process.poll() is None
