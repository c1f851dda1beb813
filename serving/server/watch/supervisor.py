"""Supervise a tritonserver: keep its models serving, start it again when it dies, and stop it on a signal."""

import signal
import time
from collections.abc import Callable

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
        say: called with a line for each event.
        follower: follows the models' release files while the server runs. None: do not follow them.

    Raises:
        ServingError: the server does not say which models it serves.
    """

    def __init__(
        self, server: Server, recover: bool, say: Callable[[str], None], follower: ReleaseFollower | None = None
    ) -> None:
        self._server = server
        self._recover = recover
        self._say = say
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
            self._say(
                f"tritonserver ended with {signal.Signals(-code).name} while it stopped, with nothing left to answer"
            )
            return 0
        return code

    def _is_answering(self) -> bool:
        return any(stub.is_busy() for stub in living_stubs(self._server.process.pid))

    def _watch(self, *, is_anew: bool) -> int:
        """Watch until this tritonserver has ended. Returns its exit code."""
        watcher = ModelWatcher(self._server, self._served, self._recover, self._say)
        watcher.start(is_anew=is_anew)
        while (code := self._server.process.poll()) is None and not self._stopping:
            self._server.condition.seen = time.monotonic()
            self._server.kept.restore()
            if watcher.failure is not None:
                self._failure = watcher.failure
                self.stop(signal.SIGTERM)
            elif watcher.lost is not None:
                self._say(f"tritonserver does not answer, and is killed: {watcher.lost}")
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
            self._say(f"tritonserver died again ({reason}), after {MOST} starts within {WITHIN_S / 60:g} minutes")
            return False
        self._server.condition.server = f"tritonserver died ({reason}); it is started anew"
        self._server.condition.models.clear()
        self._server.note_recovery(None, f"tritonserver died ({reason})")
        pause = f", in {pause_s:g} s" if pause_s else ""
        count = f"{self._restarts.recent} of at most {MOST} times"
        self._say(f"tritonserver died ({reason}); starting it anew, {count}{pause}")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._stopping:
            self._server.condition.seen = time.monotonic()
            time.sleep(_PERIOD_S)
        if not self._stopping:
            self._server.start_anew()
        if self._stopping:  # the signal came before the new server could get it
            self._server.signal(signal.SIGTERM)
        return not self._stopping or self._server.process.poll() is None
