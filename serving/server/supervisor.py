"""Supervise a tritonserver: keep its models serving, start it anew when it dies, stop it when told to."""

import signal
import time
from collections.abc import Callable

from serving.errors import ServingError
from serving.server.follower import Follower
from serving.server.keeper import Keeper, Served
from serving.server.oom_kills import OomKills
from serving.server.process import Server
from serving.server.restarts import MOST, WITHIN_S, Restarts
from serving.triton.stubs import living_stubs

_PERIOD_S = 0.25
_ASK_TIMEOUT_S = 10.0
# A server that is stopping has so long after its models fell idle, to send the last answers and end by itself.
_LAST_ANSWERS_S = 3.0


class Supervisor:
    """Watches a server from the main thread. It never blocks there for long, so signals are handled at once.

    Args:
        server: a running server.
        recover: whether to load models anew that die or hang, and to start the server anew when it dies.
        say: gets a line for each thing that happens.
        follower: loads what releases say while the server runs. None: nobody does.

    Raises:
        ServingError: the server does not say what it serves.
    """

    def __init__(
        self, server: Server, recover: bool, say: Callable[[str], None], follower: Follower | None = None
    ) -> None:
        self._server = server
        self._recover = recover
        self._say = say
        self._follower = follower
        self._served = Served(server.started)
        control = server.control(_ASK_TIMEOUT_S)
        self._served.update(control.index(), control)
        self._restarts = Restarts()
        # Whether the last tritonserver that ended had come to serve.
        self._has_served = False
        self._oom_kills = OomKills()
        self._failure: ServingError | None = None
        self._stopping = False
        # Whether no model was answering when we last looked, since the stop.
        self._is_idle = False

    def stop(self, number: int) -> None:
        """Stop: pass signal `number` on to the server, which answers what it accepted and ends."""
        self._stopping = True
        self._is_idle = not self._is_answering()
        if self._follower is not None:
            self._follower.end()
        self._server.signal(number)

    def wait(self) -> int:
        """Watch until the server has ended and is not started anew; its exit code.

        A server that crashes while it stops counts as stopped, if it had nothing left to answer. Triton 2.51 does so
        in some runs, after many callers gave up.

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
        """Watch until this tritonserver has ended; its exit code."""
        keeper = Keeper(self._server, self._served, self._recover, self._say)
        keeper.start(is_anew=is_anew)
        while (code := self._server.process.poll()) is None and not self._stopping:
            self._oom_kills.look()
            self._server.kept.restore()
            if keeper.failure is not None:
                self._failure = keeper.failure
                self.stop(signal.SIGTERM)
            elif keeper.lost is not None:
                self._say(f"tritonserver does not answer, and is killed: {keeper.lost}")
                self._server.process.kill()
                self._server.process.wait()
            else:
                time.sleep(_PERIOD_S)
        keeper.end()
        self._has_served = keeper.has_loaded
        return self._await_end() if code is None else code

    def _await_end(self) -> int:
        """Wait until a server that was told to stop has ended; its exit code.

        Triton itself waits until its exit timeout for requests that it has lost, and for models whose process died.
        But when no model is busy, no request is left: Triton hands a queued one to an idle model at once. So the
        server is killed when its models have been idle for a while.
        """
        idle_since = time.monotonic()
        deadline = idle_since + self._server.exit_timeout_s
        while (code := self._server.process.poll()) is None:
            now = time.monotonic()
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
        """Start a server in place of one that died. False if too many died recently, or a stop was asked for."""
        reason = signal.Signals(-code).name if code < 0 else f"{code}: {self._server.child.output.reason()}"
        reason += self._oom_kills.said()
        pause_s = self._restarts.next_pause_s(has_served=self._has_served)
        if pause_s is None:
            self._say(f"tritonserver died again ({reason}), after {MOST} starts within {WITHIN_S / 60:g} minutes")
            return False
        self._server.note_recovery(None, f"tritonserver died ({reason})")
        pause = f", in {pause_s:g} s" if pause_s else ""
        count = f"{self._restarts.recent} of at most {MOST} times"
        self._say(f"tritonserver died ({reason}); starting it anew, {count}{pause}")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._stopping:
            time.sleep(_PERIOD_S)
        if not self._stopping:
            self._server.start_anew()
        if self._stopping:  # the signal came too early for the new one
            self._server.signal(signal.SIGTERM)
        return not self._stopping or self._server.process.poll() is None
