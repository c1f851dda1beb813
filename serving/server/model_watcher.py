"""Keep the models of a tritonserver serving: find those whose process died or hangs, and load them again."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serving.errors import DeadlineExceeded, ServerUnavailable, ServingError, TritonserverFailed
from serving.model.config_file import OURS
from serving.server.hang_check import HangCheck
from serving.server.running_server import Served, Server
from serving.server.versions import loading
from serving.triton.command_line import erase_from_command_line
from serving.triton.control import Control, metrics_page
from serving.triton.stubs import living_stubs

_PERIOD_S = 0.25
# If the server does not answer control calls for _SILENT_S, that is reported. After _LOST_S, it counts as hanging.
_SILENT_S, _LOST_S = 5.0, 60.0
# Timeouts of control calls: for states, and for loading a model.
_ASK_TIMEOUT_S, _LOAD_TIMEOUT_S = 10.0, 120.0
# Seconds before a model that could not be reloaded is loaded again: its process may have been killed meanwhile, or
# memory may be free by then.
_PAUSES_S = (1.0, 3.0)
# If a reloading model has no process for this time, in seconds, tritonserver waits forever: for a request that it
# lost, or for a process that was killed during its start.
_STUCK_S = 15.0


class ModelWatcher:
    """Watches a tritonserver on its own thread, so that the main thread does not wait for its answers.

    Args:
        server: a running server.
        served: the models that it serves. The watcher updates it.
        recover: whether to load a model again if its process died or hangs, instead of giving up.

    Attributes:
        failure: why the watcher gave up, so that the server has to be stopped; None while it watches.
        lost: why the server no longer works, so that it has to be replaced; None while it works.
        has_loaded: whether all models of `served` have been loaded.
    """

    def __init__(self, server: Server, served: Served, recover: bool) -> None:
        self.failure: ServingError | None = None
        self.lost: str | None = None
        self.has_loaded = False
        self._server = server
        self._child = server.child
        self._served = served
        self._may_recover = recover
        self._log = server.log
        self._ended = threading.Event()
        self._last_seen, self._has_complained = time.monotonic(), False
        self._suspects: set[str] = set()
        self._stopped: set[int] = set()
        self._hang_checks: dict[tuple[str, int], HangCheck] = {}
        self._present: Server | None = None
        self._taken_over = threading.Event()

    def start(self, *, is_empty: bool, present: Server | None = None) -> None:
        """Begin to watch.

        Args:
            is_empty: the server has no model yet, so load the models of `served` first.
            present: the server that this one is going to replace, and which serves until then. Once `has_loaded` is
                set, both serve the same models, and no model is loaded until `take_over` is called.
        """
        self._present = present
        threading.Thread(target=self._run, args=(is_empty,), name="model watcher", daemon=True).start()

    def take_over(self) -> None:
        """Continue: the server has replaced the present one."""
        self._taken_over.set()

    def end(self) -> None:
        """Stop watching. It does not wait for the thread to end."""
        self._ended.set()
        self._taken_over.set()

    def _run(self, is_empty: bool) -> None:
        try:
            if is_empty:
                self._load_all()
            if self._present is not None:
                self._take_over_models(self._present)
                if self._ended.is_set():
                    return
            self.has_loaded = True
            self._server.health.server_problem = None
            while not self._ended.wait(_PERIOD_S):
                self._check()
        except (DeadlineExceeded, ServerUnavailable) as error:
            self.lost = str(error)
        except ServingError as error:
            self.failure = error

    def _load_all(self) -> None:
        since = time.monotonic()
        self._wait_until_it_answers()
        erase_from_command_line(self._child.process, self._server.key, has_started=True)
        for model in sorted(self._served.configs):
            with self._server.loading[model]:
                if not self._server.control(_ASK_TIMEOUT_S).ready(model):  # `tbe-serve load` may have been quicker
                    self._load(model, since)

    def _take_over_models(self, present: Server) -> None:
        """Load the models of the present server, and wait until this server has replaced it. Other loads wait."""
        before, control = present.control(_ASK_TIMEOUT_S), self._server.control(_LOAD_TIMEOUT_S)
        with loading(before, alone=True):
            if not self._ended.is_set():
                self._served.update(before.index(), before)
                for model, versions in sorted(self._served.versions.items()):
                    if {*control.ready(model)} != {*versions}:
                        control.load(model, versions, self._served.configs[model])
                self.has_loaded = True
                self._taken_over.wait()
        self._present = None

    def _wait_until_it_answers(self) -> None:
        control = self._server.control(_ASK_TIMEOUT_S)
        deadline = time.monotonic() + _LOAD_TIMEOUT_S
        while not self._ended.wait(_PERIOD_S):
            try:
                control.index()
                metrics_page(self._server.metrics_address, _ASK_TIMEOUT_S)  # Triton opens them last
            except ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def _check(self) -> None:
        control = self._server.control(_ASK_TIMEOUT_S)
        try:
            before = {**self._served.versions}
            self._served.update(control.index(), control)
            self._log_switches(before)
            answered = control.answered()
        except ServingError as error:  # the server has just ended, is busy, or refuses us
            self._report_silence(error)
            return
        self._last_seen, self._has_complained = time.monotonic(), False
        self._server.health.server_problem = None
        loading = {model for model, lock in [*self._server.loading.items()] if lock.locked()}
        dead = self._dead() - loading
        for model in sorted(dead & self._suspects):  # dead at two checks in a row: at one, it may be unloading
            self._replace(model, "a backend process died")
        self._suspects = dead - self._suspects
        hung = self._hung(answered, control) | dict.fromkeys(self._paused(), "a backend process was paused")
        for model in sorted(hung.keys() - loading):
            for stub in living_stubs(self._child.process.pid):
                if stub.model == model:
                    stub.kill()
            self._replace(model, hung[model])

    def _log_switches(self, before: Mapping[str, Sequence[int]]) -> None:
        """Log the models whose served versions have changed: by `tbe-serve load`, a release, or recovery."""
        now = self._served.versions
        for model in sorted(before.keys() | now.keys()):
            old, new = (", ".join(map(str, versions.get(model, ()))) or "none" for versions in (before, now))
            if old != new:
                self._log.info(
                    "model %r: serves version %s, before %s",
                    model,
                    new,
                    old,
                    extra={"event": "switched", **self._about(model)},
                )

    def _report_silence(self, error: ServingError) -> None:
        silent_s = time.monotonic() - self._last_seen
        if silent_s > _SILENT_S and not self._has_complained:
            self._has_complained = True
            self._server.health.server_problem = "tritonserver does not answer"
            self._log.warning(
                "cannot see its models, so a model that dies is not reloaded: %s",
                error,
                extra={"event": "server_silent"},
            )
        if silent_s > _LOST_S and isinstance(error, DeadlineExceeded):
            raise error

    def _dead(self) -> set[str]:
        """Models with fewer running processes than instances."""
        living = Counter((stub.model, stub.version) for stub in living_stubs(self._child.process.pid))
        return {
            model
            for model, config in self._served.configs.items()
            if config["backend"] == "python"
            and any(
                living[model, version] < sum(int(group["count"]) for group in config["instance_group"])
                for version in self._served.versions[model]
            )
        }

    def _paused(self) -> set[str]:
        """Models with a process that was stopped (SIGSTOP) at this check and at the last one.

        If such a process continued, it could end tritonserver, whose locks have a deadline.
        """
        before = self._stopped
        stopped = {stub for stub in living_stubs(self._child.process.pid) if stub.is_stopped()}
        self._stopped = {stub.process.pid for stub in stopped}
        return {stub.model for stub in stopped if stub.process.pid in before} & self._served.configs.keys()

    def _hung(self, answered: Mapping[tuple[str, int], int], control: Control) -> dict[str, str]:
        """The reason for each model that hangs. Only models that tbe-export made are checked."""
        stubs = list(living_stubs(self._child.process.pid))
        hung = {}
        for model, config in self._served.configs.items():
            for version in self._served.versions[model] if OURS in config["parameters"] else ():
                check = self._hang_checks.setdefault((model, version), HangCheck(model, version, config))
                reads = sum(stub.page_reads() for stub in stubs if (stub.model, stub.version) == (model, version))
                patient = replace(control, timeout_s=check.overdue_s)
                if check.is_overdue((answered.get((model, version)), reads), patient):
                    hung[model] = f"it answered no request for {check.overdue_s:g} s"
        return hung

    def _replace(self, model: str, why: str) -> None:
        if not self._may_recover:
            raise TritonserverFailed(f"model {model!r}: {why}; stopping, as --no-recover says")
        self._log.error("model %r: %s; reloading", model, why, extra={"event": "model_died", **self._about(model)})
        since = time.monotonic()
        self._server.note_recovery(model, why)
        self._server.health.model_problems[model] = f"{why}; reloading"
        with self._server.loading[model]:
            self._load(model, since)
        del self._server.health.model_problems[model]

    def _load(self, model: str, since: float) -> None:
        """Load a model again. `since` is when it died or was killed, by time.monotonic()."""
        self._recover(model)
        for key in [key for key in self._hang_checks if key[0] == model]:
            del self._hang_checks[key]
        if self._present is not None:
            return
        self._log.info(
            "model %r: serves again after %.1f s",
            model,
            time.monotonic() - since,
            extra={"event": "model_recovered", **self._about(model)},
        )

    def _recover(self, model: str) -> None:
        """Load a model as it was served. If that fails, try again after each pause of `_PAUSES_S`."""
        served, control = self._served, self._server.control(_LOAD_TIMEOUT_S)
        for pause_s in (*_PAUSES_S, None):
            loaded = threading.Event()
            if OURS in served.configs[model]["parameters"]:  # others may begin late, or have no process
                watch = threading.Thread(target=self._watch_for_process, args=(model, loaded), daemon=True)
                watch.start()
            try:
                control.recover(model, served.configs[model], served.versions[model], served.since)
            except (DeadlineExceeded, ServerUnavailable):
                raise  # it is tritonserver that does not work
            except ServingError as error:
                if pause_s is None or self._ended.wait(pause_s):
                    raise
                self._log.warning(
                    "model %r: could not be reloaded; trying once more: %s",
                    model,
                    error,
                    extra={"event": "model_not_loaded", **self._about(model)},
                )
            else:
                return
            finally:
                loaded.set()

    def _watch_for_process(self, model: str, loaded: threading.Event) -> None:
        """Report tritonserver as lost if a model that is being loaded has no new process for `_STUCK_S`."""
        before = {stub.process.pid for stub in living_stubs(self._child.process.pid)}
        last_seen = time.monotonic()
        while not loaded.wait(_PERIOD_S):
            living = (stub for stub in living_stubs(self._child.process.pid) if stub.model == model)
            if any(stub.process.pid not in before for stub in living):
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > _STUCK_S:
                self.lost = f"model {model!r}: has no process {_STUCK_S:g} s after its reload began"
                return

    def _about(self, model: str) -> dict[str, Any]:
        """Fields for the log: the model, and the newest version that it serves."""
        return {"model": model, "version": max(self._served.versions.get(model, ()), default=None)}
