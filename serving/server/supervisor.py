"""Notice when a model's process died, and have the server load the model anew; see a stop through to its end."""

import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil

from serving.errors import ServerFailed, ServingError
from serving.server.control import Control
from serving.server.process import Server
from serving.server.stubs import living_stubs

_PERIOD_S = 0.25
# After so many looks in vain it is worth a word.
_BLIND_LOOKS = 20
# How long a model may take to load.
_LOAD_TIMEOUT_S = 120.0
# After the last model has ended, time to send what it answered.
_LAST_ANSWERS_S = 1.0


class Supervisor:
    """Watches a server from the thread that waits for it.

    Args:
        server: a running server.
        recover: whether to load a model anew when its process died, rather than to stop the server.
        say: told what happens, a line each time.
    """

    def __init__(self, server: Server, recover: bool, say: Callable[[str], None]) -> None:
        self._server = server
        self._recover = recover
        self._say = say
        self._process = psutil.Process(server.process.pid)
        self._stopping = False
        self._suspects: set[str] = set()
        self._abandoned = False
        self._failure: ServingError | None = None
        self._blind = 0

    def stop(self, number: int) -> None:
        """Pass a signal on. The server answers what it has accepted, then ends."""
        self._stopping = True
        self._server.signal(number)

    def wait(self) -> int:
        """Watch until the server ends; its exit code.

        Raises:
            ServerFailed: a model's process died and was not, or could not be, replaced.
        """
        control = self._server.control(_LOAD_TIMEOUT_S)
        while (code := self._server.process.poll()) is None:
            if self._stopping:
                self._end()
            else:
                self._look(control)
            time.sleep(_PERIOD_S)
        if self._failure is not None:
            raise self._failure
        # Ended by us, when all its models had ended.
        return 0 if self._stopping and self._abandoned and code == -signal.SIGKILL else code

    def _look(self, control: Control) -> None:
        """Replace models with fewer processes than instances, at the second look: one may just be unloading."""
        try:
            missing = self._missing(control)
        except ServingError as error:  # the server has just ended, is busy, or does not let us in
            self._blind += 1
            if self._blind == _BLIND_LOOKS:
                self._say(f"cannot see its models, so one that dies will not be loaded anew: {error}")
            return
        self._blind = 0
        for model in sorted(missing & self._suspects):
            try:
                self._replace(control, model)
            except ServingError as error:
                self._failure = error
                self.stop(signal.SIGTERM)
        self._suspects = missing - self._suspects

    def _replace(self, control: Control, model: str) -> None:
        self._abandoned = True
        reason = f"model {model!r}: a process of its died"
        if not self._recover:
            raise ServerFailed(f"{reason}; stopping, as --no-recover says")
        self._say(f"{reason}; loading it anew")
        started = time.monotonic()
        control.recover(model, self._process.create_time())
        self._say(f"model {model!r}: serves again after {time.monotonic() - started:.1f} s")

    def _missing(self, control: Control) -> set[str]:
        living = Counter(living_stubs(self._process))
        missing = set()
        for each in control.index():
            if each.state == "READY":
                config = control.config(each.model)
                instances = sum(int(group["count"]) for group in config["instance_group"])
                if config["backend"] == "python" and living[each.model, each.version] < instances:
                    missing.add(each.model)
        return missing

    def _end(self) -> None:
        """Triton waits for a model whose process died until its exit timeout; nothing is left to wait for."""
        if self._abandoned and not any(living_stubs(self._process)):
            time.sleep(_LAST_ANSWERS_S)
            self._server.process.kill()
