"""Supervise a tritonserver: keep its models serving, start it again when it dies, replace it when its certificate is
renewed, and drain and stop it on a signal."""

import signal
import time

from serving.errors import ServingError
from serving.server.certificate_renewal import LAST_ANSWERS_S, CertificateRenewal
from serving.server.drain import Drain
from serving.server.model_watcher import ModelWatcher
from serving.server.releases import ReleaseFollower
from serving.server.running_server import Served, Server
from serving.triton.stubs import living_stubs

MOST, WITHIN_S = 5, 600.0


class Restarts:
    """Decides whether and when a server is started again: at most MOST times within WITHIN_S.

    The pause is 0 s if the last server had loaded its models; after failed starts it is 1, 3, 7, 15 s.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._failed = 0

    @property
    def recent(self) -> int:
        """Restarts within the last WITHIN_S."""
        return len(self._times)

    def next_pause_s(self, *, has_served: bool) -> float | None:
        """Count a restart. Returns the seconds to wait before it, or None if there were MOST already.

        Args:
            has_served: whether the server that died had loaded its models.
        """
        now = time.monotonic()
        self._times = [started for started in self._times if now - started < WITHIN_S]
        if len(self._times) >= MOST:
            return None
        self._times.append(now)
        self._failed = 0 if has_served else self._failed + 1
        return 2.0**self._failed - 1


_PERIOD_S, _ASK_TIMEOUT_S = 0.25, 10.0


class Supervisor:
    """Watches a server from one thread without long waits, so that the main thread handles signals at once.

    Args:
        server: a running server.
        recover: whether to load models again that die or hang, and to start the server again if it dies.
        follower: follows the models' release files while the server runs, or None.

    Raises:
        ServingError: the server cannot be asked which models it serves.
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
        self._renewal = CertificateRenewal(server, self._served, recover)
        self._drain: Drain | None = None
        # The signal that stops the server, and the signal that ended it at once.
        self._number: int = signal.SIGTERM
        self._killed_by: int | None = None
        self._stopping = False
        # Whether no model was answering at the last check, while stopping.
        self._is_idle = False

    def stop(self, number: int) -> None:
        """Stop by signal `number`: drain if configured, then answer accepted requests. A second call ends the server.

        Signal handlers may call this: it does not wait.
        """
        if self._stopping or self._drain is not None:
            self._kill(number)
        elif self._server.drain_s and self._server.health.server_problem is None:
            self._number = number
            self._drain = Drain(self._server.drain_s, self._server.port_handover, time.monotonic())
            self._server.health.is_draining = True
            if self._follower is not None:
                self._follower.end()
            line = "drains for up to %g s: not ready, still answers requests; a second signal ends it at once"
            self._log.info(line, self._server.drain_s, extra={"event": "draining"})
        else:
            self._stop(number)

    def _kill(self, number: int) -> None:
        """End the server at once. Accepted requests are lost."""
        self._stopping = self._server.health.is_stopping = True
        self._killed_by = number
        self._server.signal(signal.SIGKILL)
        self._renewal.signal(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        """Send a signal to the server, which answers accepted requests and ends."""
        self._stopping = self._server.health.is_stopping = True
        self._is_idle = not self._is_answering()
        if self._follower is not None:
            self._follower.end()
        self._server.signal(number)
        self._renewal.signal(number)
        # Last: a log without a reader may block its writers.
        self._log.info("stopping: accepted requests are answered", extra={"event": "stopping"})

    def wait(self) -> int:
        """Watch until the server has ended for good. Returns its exit code, or minus the signal that ended it.

        If a server crashes while it stops and no request was left, the exit code is 0. Triton 2.51 sometimes crashes
        then after many clients gave up.

        Raises:
            ServingError: a model's process died or hangs, and was not replaced.
        """
        if self._follower is not None:
            self._follower.start()
        code = self._watch(is_empty=False)
        while code and self._recover and not self._is_told_to_stop and self._restart(code):
            code = self._watch(is_empty=True)
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
        """The exit code: 0 for a crash during a stop in which no request was left to answer."""
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

    def _watch(self, *, is_empty: bool) -> int:
        """Watch until this tritonserver has ended. Returns its exit code."""
        watcher = ModelWatcher(self._server, self._served, self._recover)
        watcher.start(is_empty=is_empty)
        while (code := self._server.process.poll()) is None and not self._stopping:
            self._server.health.last_supervised = time.monotonic()
            self._server.run_file_writer.restore()
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
        else:  # connections are directed to the next process if no other listens
            self._renewal.signal(signal.SIGKILL)
        self._renewal.end()
        return code

    def _has_drained(self, drain: Drain) -> bool:
        """Whether the server has no connections left, or its drain time is up."""
        if self._server.run_file.drains_until is None:
            self._server.run_file_writer.update(drains_until=time.time() + drain.drain_s)
            self._renewal.stop_looking()
        return drain.is_over(self._renewal.processes)

    def _await_end(self) -> int:
        """Wait until a stopping server has ended. Returns its exit code.

        Triton waits for lost requests, and for models whose process died, until its exit timeout. If no model is
        busy, no request is left, because Triton hands a queued request to an idle model at once. So the server is
        killed when its models have been idle for LAST_ANSWERS_S.
        """
        idle_since = time.monotonic()
        deadline = idle_since + self._server.exit_timeout_s
        while (code := self._server.process.poll()) is None:
            now = self._server.health.last_supervised = time.monotonic()
            is_answering = self._is_answering()
            if is_answering:
                idle_since = now
            if self._server.process.poll() is None:  # else it had ended before we looked
                self._is_idle = not is_answering
            if now > min(deadline, idle_since + LAST_ANSWERS_S):
                self._server.process.kill()
                return 0 if now < deadline else self._server.process.wait()
            time.sleep(_PERIOD_S)
        return code

    def _restart(self, code: int) -> bool:
        """Replace a server that died. Returns False if too many died recently, or if it is to stop."""
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
        self._server.health.server_problem = f"tritonserver died ({reason}); restarting"
        self._server.health.model_problems.clear()
        self._server.note_recovery(None, f"tritonserver died ({reason})")
        pause = f", in {pause_s:g} s" if pause_s else ""
        count = f"{self._restarts.recent} of at most {MOST} times"
        self._log.error(
            "tritonserver died (%s); restarting, %s%s", reason, count, pause, extra={"event": "server_died"}
        )
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._is_told_to_stop:
            self._server.health.last_supervised = time.monotonic()
            time.sleep(_PERIOD_S)
        if not self._is_told_to_stop:
            self._server.restart()
        if self._stopping:  # the signal came before the new server could get it
            self._server.signal(signal.SIGTERM if self._killed_by is None else signal.SIGKILL)
        return not self._is_told_to_stop or self._server.process.poll() is None
