"""Keep the models of a tritonserver serving: notice which died or hang, and load them anew."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from serving.errors import DeadlineExceeded, ServerFailed, ServerUnavailable, ServingError
from serving.server.canary import PATIENCE_S, PERIOD_S, Canary
from serving.server.control import Control, VersionState
from serving.server.hidden import hide
from serving.server.process import Server
from serving.server.stubs import living_stubs

_PERIOD_S = 0.25
# After so long in vain it is worth a word; after so long the server itself hangs.
_BLIND_S, _LOST_S = 5.0, 60.0
# How long a question may take, and how long a model may take to load.
_ASK_TIMEOUT_S, _LOAD_TIMEOUT_S = 10.0, 120.0
_UNLOADED = "unloaded"
# What models of ours say in their config.
_OURS = "contract"


@dataclass(slots=True)
class Served:
    """What is served, whatever becomes of the server: by model, its config and the versions that are ready.

    Attributes:
        since: Unix time; weights that have not changed since were verified.
    """

    since: float
    configs: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def learn(self, index: tuple[VersionState, ...], control: Control) -> None:
        """Take over what became ready, and leave out what somebody unloaded. What Triton forgot is still served."""
        for model in {each.model for each in index}:
            states = [each for each in index if each.model == model]
            if ready := tuple(each.version for each in states if each.state == "READY"):
                self.configs[model], self.versions[model] = control.config(model), ready
            elif all(each.reason == _UNLOADED for each in states):
                self.configs.pop(model, None)
                self.versions.pop(model, None)


class Keeper:
    """Watches one tritonserver, on a thread of its own: whatever a question to it takes, nobody else waits for it.

    Args:
        server: a running server.
        served: what it serves, or has to where `is_anew`.
        recover: whether to load a model anew, rather than to give up.
        say: told what happens, a line each time.

    Attributes:
        failure: why it gave up: the server should be stopped.
        lost: why the server is of no use any more: another should be started.
    """

    def __init__(self, server: Server, served: Served, recover: bool, say: Callable[[str], None]) -> None:
        self.failure: ServingError | None = None
        self.lost: str | None = None
        self._server = server
        self._child = server.child
        self._served = served
        self._recover = recover
        self._say = say
        self._ended = threading.Event()
        self._seen, self._has_complained = time.monotonic(), False
        self._suspects: set[str] = set()
        self._canaries: dict[tuple[str, int], Canary] = {}

    def start(self, *, is_anew: bool) -> None:
        """Begin; where `is_anew`, by loading what is served into a server that has nothing loaded yet."""
        threading.Thread(target=self._run, args=(is_anew,), name="keeper", daemon=True).start()

    def end(self) -> None:
        """Do nothing any more; does not wait for what is being done."""
        self._ended.set()

    def _run(self, is_anew: bool) -> None:
        try:
            if is_anew:
                self._load_all()
            while not self._ended.wait(_PERIOD_S):
                self._look()
        except (DeadlineExceeded, ServerUnavailable) as error:
            self.lost = str(error)
        except ServingError as error:
            self.failure = error

    def _load_all(self) -> None:
        self._wait_until_it_answers()
        hide(self._child.process, self._server.key, answers=True)
        for model in sorted(self._served.configs):
            if not self._server.control(_ASK_TIMEOUT_S).ready(model):  # somebody else was quicker
                self._load(model)

    def _wait_until_it_answers(self) -> None:
        control = self._server.control(_ASK_TIMEOUT_S)
        deadline = time.monotonic() + _LOAD_TIMEOUT_S
        while not self._ended.wait(_PERIOD_S):
            try:
                control.index()
            except ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def _look(self) -> None:
        control = self._server.control(_ASK_TIMEOUT_S)
        try:
            self._served.learn(control.index(), control)
            answered = control.answered()
        except ServingError as error:  # the server has just ended, is busy, or does not let us in
            self._complain(error)
            return
        self._seen, self._has_complained = time.monotonic(), False
        dead = self._dead()
        for model in sorted(dead & self._suspects):  # at the second look: one may just be unloading
            self._replace(model, "a process of its died")
        self._suspects = dead - self._suspects
        for model in sorted(self._hung(answered, control)):
            for stub in living_stubs(self._child.process.pid):
                if stub.model == model:
                    stub.kill()
            self._replace(model, f"it answered nobody for {PERIOD_S + PATIENCE_S:g} s")

    def _complain(self, error: ServingError) -> None:
        blind_s = time.monotonic() - self._seen
        if blind_s > _BLIND_S and not self._has_complained:
            self._has_complained = True
            self._say(f"cannot see its models, so one that dies will not be loaded anew: {error}")
        if blind_s > _LOST_S and isinstance(error, DeadlineExceeded):
            raise error

    def _dead(self) -> set[str]:
        """Models with fewer processes than instances."""
        living = Counter((stub.model, stub.version) for stub in living_stubs(self._child.process.pid))
        return {
            model
            for model, config in self._served.configs.items()
            if config["backend"] == "python"
            and any(living[model, version] < _instances(config) for version in self._served.versions[model])
        }

    def _hung(self, answered: Mapping[tuple[str, int], int], control: Control) -> set[str]:
        """Models of ours with a version that answers nobody."""
        stubs = list(living_stubs(self._child.process.pid))
        patient = replace(control, timeout_s=PERIOD_S + PATIENCE_S)
        hung = set()
        for model, config in self._served.configs.items():
            for version in self._served.versions[model] if _OURS in config["parameters"] else ():
                canary = self._canaries.setdefault((model, version), Canary(model, version, config))
                reads = sum(each.page_reads() for each in stubs if (each.model, each.version) == (model, version))
                if canary.is_overdue((answered.get((model, version)), reads), patient):
                    hung.add(model)
        return hung

    def _replace(self, model: str, why: str) -> None:
        if not self._recover:
            raise ServerFailed(f"model {model!r}: {why}; stopping, as --no-recover says")
        self._say(f"model {model!r}: {why}; loading it anew")
        self._load(model)

    def _load(self, model: str) -> None:
        started = time.monotonic()
        self._server.control(_LOAD_TIMEOUT_S).recover(model, self._served.configs[model], self._served.since)
        for key in [key for key in self._canaries if key[0] == model]:
            del self._canaries[key]
        self._say(f"model {model!r}: serves again after {time.monotonic() - started:.1f} s")


def _instances(config: Any) -> int:
    return sum(int(group["count"]) for group in config["instance_group"])
