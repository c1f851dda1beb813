"""Supervise tritonservers: keep their models serving, start them again when they die, and stop them on a signal."""

import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from serving.errors import ServingError
from serving.server.launch.server import Server
from serving.server.watch.model_watcher import ModelWatcher, Served
from serving.server.watch.release_follower import ReleaseFollower
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


_PERIOD_S = 0.25
_ASK_TIMEOUT_S = 10.0
# Seconds from when its models are idle until a stopping server is killed: it has to send its last answers, and end.
_LAST_ANSWERS_S = 3.0


class Supervisor:
    """Watches a server from one thread. It never blocks that thread for long: on the main one, signals are handled at
    once.

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
        self._stopping = False
        # Whether no model was answering at the last check, while stopping.
        self._is_idle = False

    def stop(self, number: int) -> None:
        """Stop: send signal `number` to the server. It answers the requests that it accepted, and ends."""
        self._stopping = self._server.condition.is_stopping = True
        self._is_idle = not self._is_answering()
        if self._follower is not None:
            self._follower.end()
        self._server.signal(number)
        # Last: a log that nobody reads may hold up whoever writes to it.
        self._log.info("stops: what was accepted is answered", extra={"event": "stopping"})

    def wait(self) -> int:
        """Watch until the server has ended and is not started again. Returns its exit code.

        If a server crashes while it stops, and no request was left, the exit code is 0. Triton 2.51 sometimes does so
        after many clients gave up.

        Raises:
            ServingError: a model's process died or hangs, and was not replaced.
        """
        if self._follower is not None:
            self._follower.start()
        code = self._watch(is_anew=False)
        while code and self._recover and not self._stopping and self._start_anew(code):
            code = self._watch(is_anew=True)
        if self._failure is not None:
            raise self._failure
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
                self.stop(signal.SIGTERM)
            elif watcher.lost is not None:
                self._log.error(
                    "tritonserver does not answer, and is killed: %s", watcher.lost, extra={"event": "server_hangs"}
                )
                self._server.process.kill()
                self._server.process.wait()
            else:
                time.sleep(_PERIOD_S)
        watcher.end()
        self._has_served = watcher.has_loaded
        return self._await_end() if code is None else code

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
        reason = signal.Signals(-code).name if code < 0 else f"{code}: {self._server.child.output.reason()}"
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
        while time.monotonic() < until and not self._stopping:
            self._server.condition.seen = time.monotonic()
            time.sleep(_PERIOD_S)
        if not self._stopping:
            self._server.start_anew()
        if self._stopping:  # the signal came before the new server could get it
            self._server.signal(signal.SIGTERM)
        return not self._stopping or self._server.process.poll() is None


class FleetSupervisor:
    """Supervises the server of a router and those of its hosts as one.

    Each server is watched, and started anew, on a thread of its own. The main thread hears signals meanwhile.

    Args:
        hosts: of the servers of the hosts.
        router: of the router's server.
    """

    def __init__(self, hosts: Sequence[Supervisor], router: Supervisor) -> None:
        self._hosts, self._router = hosts, router
        self._number: int | None = None

    def stop(self, number: int) -> None:
        """Stop all by signal `number`: the router first, which needs its hosts for what it has accepted."""
        self._number = number

    def wait(self) -> int:
        """Watch until all have ended. When one has ended for good, all others are stopped.

        Returns:
            The exit code of the router's server, or, where that is 0, of the first host's that is not.

        Raises:
            ServingError: as `Supervisor.wait`.
        """
        with ThreadPoolExecutor(1 + len(self._hosts)) as pool:
            router = pool.submit(self._router.wait)
            hosts = [pool.submit(each.wait) for each in self._hosts]
            while self._number is None and not wait([router, *hosts], 0, FIRST_COMPLETED).done:
                time.sleep(_PERIOD_S)
            number = signal.SIGTERM if self._number is None else self._number
            _stop([self._router], [router], number)
            _stop(self._hosts, hosts, number)
        return next((code for code in (each.result() for each in (router, *hosts)) if code), 0)


def _stop(supervisors: Sequence[Supervisor], running: Sequence["Future[int]"], number: int) -> None:
    """Stop those that run, and wait until they have ended."""
    for supervisor, each in zip(supervisors, running, strict=True):
        if not each.done():
            supervisor.stop(number)
    wait(running)
