"""Switch to renewed certificates: a second tritonserver process replaces the present one without a lost call."""

import math
import threading
import time

from serving.errors import ServingError
from serving.server.model_watcher import ModelWatcher
from serving.server.port_handover import PortHandover
from serving.server.running_server import Served, Server

# Seconds from when its models are idle until a stopping server is killed: it has to send its last answers, and end.
LAST_ANSWERS_S = 3.0

# In seconds: the pause between two checks of the certificate files, and before a failed renewal is tried again; the
# time for connections that began before the handover to reach their process; and for that process to accept them.
_CHECK_PERIOD_S, _AGAIN_S, _REACHED_S, _ACCEPTED_S = 2.0, 60.0, 2.0, 30.0
_MISFITS = 5  # checks with a certificate and key that do not match before this is logged
_FAILED = "cannot switch to the renewed certificates, and keeps the previous ones"


class CertificateRenewal:
    """Switches a server to renewed certificates, which tritonserver reads only when it starts.

    A second process starts beside the current one. When it serves the same models, new connections go to it, and the
    old process ends after its last connection has closed.
    """

    def __init__(self, server: Server, served: Served, recover: bool) -> None:
        self._server, self._served, self._recover = server, served, recover
        self._next_look = 0.0
        # The digest of the files at the last look, and of the files that the log has reported as unusable.
        self._last_digest, self._refused = server.loaded_digest, b"-"
        self._wrong_parts = 0
        self._second: tuple[Server, ModelWatcher, Served] | None = None
        self._before: Server | None = None
        self._ending: threading.Thread | None = None
        # Until when the process before may have connections, and until when not all are known that it has.
        self._until = self._unknown_until = 0.0

    def step(self, watcher: ModelWatcher) -> ModelWatcher:
        """Do what is due. Returns the watcher of the process that serves, of which `watcher` is the present one."""
        now, port_handover = time.monotonic(), self._server.port_handover
        if port_handover is None:
            return watcher
        if self._before is not None:
            self._end_before(self._before, port_handover, now)
        elif self._second is not None:
            return self._step_second(*self._second, watcher)
        elif now >= self._next_look and watcher.has_loaded:
            self._next_look = now + _CHECK_PERIOD_S
            if self._is_due():
                self._server.log.info(
                    "certificates were renewed: starting another tritonserver", extra={"event": "renewing"}
                )
                second, served = self._server.replacement(), self._served.copy()
                self._second = second, ModelWatcher(second, served, self._recover), served
                self._second[1].start(is_empty=True, present=self._server)
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
        """The processes that may have connections of clients: the present one, and the one before it."""
        return [server.process.pid for server in (self._server, self._before) if server is not None]

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
        before, self._last_digest = self._last_digest, self._server.digest()
        if self._last_digest != before:
            self._wrong_parts = 0
            return False
        if self._last_digest in (self._server.loaded_digest, self._refused):
            return False
        try:
            self._server.expect_usable()
            problem = ""
        except ServingError as error:
            problem = str(error)
        self._wrong_parts += 1
        if problem and self._wrong_parts == _MISFITS:  # else the rest of them is still to come
            self._log_failed_renewal(problem)
            self._refused = self._last_digest
        return not problem

    def _log_failed_renewal(self, problem: object) -> None:
        self._server.log.error(f"{_FAILED}: %s", problem, extra={"event": "renewal_failed"})

    def _step_second(self, second: Server, its: ModelWatcher, served: Served, watcher: ModelWatcher) -> ModelWatcher:
        problem: object = its.lost or its.failure
        if (code := second.process.poll()) is not None:
            problem = second.child.why(code)
        if problem is None and its.has_loaded:
            try:
                self._before = self._server.adopt(second)
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
            self._log_failed_renewal(problem)
            self._next_look = time.monotonic() + _AGAIN_S
            self.end()
        return watcher

    def _end_before(self, before: Server, port_handover: PortHandover, now: float) -> None:
        if self._ending is None and now > self._unknown_until:
            has_connections = port_handover.has_connections(before.process.pid)
            if not has_connections:
                before.exit_timeout_s = LAST_ANSWERS_S  # no client waits for one
            if not has_connections or now > self._until:
                self._ending = threading.Thread(target=before.end, name="process before", daemon=True)
                self._ending.start()
        elif self._ending is not None and not self._ending.is_alive():
            port_handover.predecessor_ended()
            self._before = self._ending = None
