"""See a tritonserver through: have its models kept serving, start it anew when it died, and end it when told to."""

import signal
import time
from collections.abc import Callable

from serving.errors import ServingError
from serving.server.keeper import Keeper, Served
from serving.server.process import Server
from serving.server.restarts import MOST, WITHIN_S, Restarts
from serving.server.stubs import living_stubs

_PERIOD_S = 0.25
_ASK_TIMEOUT_S = 10.0
# Once its models answer nobody any more: time to send the last answers, and to end by itself.
_LAST_ANSWERS_S = 3.0


class Supervisor:
    """Watches a server from the main thread, which waits for nothing else: a signal is heard at any time.

    Args:
        server: a running server.
        recover: whether to load a model anew when its process died or hangs, and to start a server anew that died.
        say: told what happens, a line each time.

    Raises:
        ServingError: it cannot be asked what it serves.
    """

    def __init__(self, server: Server, recover: bool, say: Callable[[str], None]) -> None:
        self._server = server
        self._recover = recover
        self._say = say
        self._served = Served(server.started)
        control = server.control(_ASK_TIMEOUT_S)
        self._served.learn(control.index(), control)
        self._restarts = Restarts()
        self._failure: ServingError | None = None
        self._stopping = False

    def stop(self, number: int) -> None:
        """Pass a signal on. The server answers what it has accepted, then ends."""
        self._stopping = True
        self._server.signal(number)

    def wait(self) -> int:
        """Watch until the server has ended for good; its exit code.

        Raises:
            ServingError: a model's process died or hangs, and was not, or could not be, replaced.
        """
        code = self._watch(is_anew=False)
        while code and self._recover and not self._stopping and self._start_anew(code):
            code = self._watch(is_anew=True)
        if self._failure is not None:
            raise self._failure
        return code

    def _watch(self, *, is_anew: bool) -> int:
        """Until this tritonserver has ended; its exit code."""
        keeper = Keeper(self._server, self._served, self._recover, self._say)
        keeper.start(is_anew=is_anew)
        while (code := self._server.process.poll()) is None and not self._stopping:
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
        return self._see_it_end() if code is None else code

    def _see_it_end(self) -> int:
        """Until a server that was told to stop has ended; its exit code.

        Triton waits for requests that it has lost, and for models whose process died, until its exit timeout. Nobody
        waits for an answer once no model says that it is busy: what is queued is handed to an idle one at once.
        """
        idle_since = time.monotonic()
        deadline = idle_since + self._server.exit_timeout_s
        while (code := self._server.process.poll()) is None:
            now = time.monotonic()
            if any(stub.is_busy() for stub in living_stubs(self._server.process.pid)):
                idle_since = now
            if now > min(deadline, idle_since + _LAST_ANSWERS_S):
                self._server.process.kill()
                return 0 if now < deadline else self._server.process.wait()
            time.sleep(_PERIOD_S)
        return code

    def _start_anew(self, code: int) -> bool:
        """Put another server in the place of one that died, unless too many did of late, or a stop was asked for."""
        reason = signal.Signals(-code).name if code < 0 else f"{code}: {self._server.child.output.reason()}"
        pause_s = self._restarts.next_pause_s()
        if pause_s is None:
            self._say(f"tritonserver died again ({reason}), after {MOST} starts within {WITHIN_S / 60:g} minutes")
            return False
        self._say(f"tritonserver died ({reason}); starting it anew, {self._restarts.recent} of at most {MOST} times")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._stopping:
            time.sleep(_PERIOD_S)
        if not self._stopping:
            self._server.start_anew()
        if self._stopping:  # a signal that came meanwhile met the one that had ended
            self._server.signal(signal.SIGTERM)
        return not self._stopping or self._server.process.poll() is None
