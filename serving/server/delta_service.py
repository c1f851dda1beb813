"""The live copies of a server: keep their delta writer running, fetch their deltas, and report their state.

`serving.tables.mutable_tables` has the copies, and `serving.tables.delta_writer` is the process that writes deltas to
them. A server without live copies starts no delta writer. Deltas in a store are fetched into a folder, where the
delta writer finds them.
"""

import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from serving.bundle.lineage import Step, delta_path, reached, steps_in
from serving.delta_store import DeltaStore, LiveLineage, lineages
from serving.errors import ServerUnavailable, ServingError
from serving.log import LogOnce, Output
from serving.tables.live_state import About, State
from serving.tables.mutable_tables import LIVE_DELTAS, LIVE_SERVER, live_copies, remove_unused_live_copies, state_of

# Seconds between checks of the copies and the delta writer.
_CHECK_PERIOD_S = 0.2
# Seconds between two lists of a folder, which may have thousands of deltas.
_LIST_PERIOD_S = 1.0
# Seconds between checks of a store. A check sends a request for each lineage.
_STORE_PERIOD_S = 0.5
# Minimum seconds between two starts of the delta writer.
_START_PERIOD_S = 1.0
# One thread, because the delta writer multiplies no matrices.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Minimum seconds between two lines of the log with the newest applied delta of a copy.
_LOG_PERIOD_S = 10.0
# A number that is missing for this long, in seconds, is reported: deltas may be copied here in any order.
_MISSING_S = 5.0


class AppliedDeltas(NamedTuple):
    """The deltas that are applied to a live copy.

    Attributes:
        about: the version.
        sequence: the number of the newest applied delta.
        sha256: the digest of its file, in hex; empty if no delta is applied.
        newest: the number of the newest delta in the folder.
        waits_since: when the oldest pending delta was first seen, by time.monotonic, or None if all deltas are
            applied.
        rows: the number of rows written so far.
        refused: the number of deltas refused so far.
        stopped: why no further delta is applied; empty if deltas are applied.
    """

    about: About
    sequence: int
    sha256: str
    newest: int
    waits_since: float | None
    rows: int
    refused: int
    stopped: str

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest pending delta was first seen; 0 if all deltas are applied."""
        return 0.0 if self.waits_since is None else time.monotonic() - self.waits_since


_METRICS: tuple[tuple[str, str, str, Callable[[AppliedDeltas], float]], ...] = (
    ("tbe_delta_sequence", "gauge", "Number of the newest delta that is applied", lambda copy: copy.sequence),
    ("tbe_delta_newest", "gauge", "Number of the newest delta that is there", lambda copy: copy.newest),
    ("tbe_delta_lag_seconds", "gauge", "Age of the oldest delta that is not applied", lambda copy: copy.lag_s),
    ("tbe_delta_rows_total", "counter", "Rows that deltas changed", lambda copy: copy.rows),
    ("tbe_delta_refused_total", "counter", "Deltas that were refused", lambda copy: copy.refused),
    ("tbe_delta_stopped", "gauge", "Whether no further delta is applied: 1 or 0", lambda copy: bool(copy.stopped)),
)


class DeltaService:
    """The live copies of a server.

    Args:
        deltas: the folder of all deltas.
        environment: environment variables of the delta writer, in addition to ours.
        log: the server's log.

    Attributes:
        environment: environment variables for the processes of the server's models.
        applied: the applied deltas of each live copy at the last check. A hanging file system delays checks, but not
            readers of this attribute.
    """

    def __init__(self, deltas: Path, environment: Mapping[str, str], log: logging.Logger) -> None:
        self._name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._variables = {**os.environ, **environment, **_ONE_THREAD}
        self._log = log
        # What was last logged of each copy: why it stopped, its newest delta, and when that may be logged again.
        self._logged_stops: dict[tuple[str, str], str] = {}
        self._logged_sequences: dict[tuple[str, str], tuple[int, float]] = {}
        # The deltas of each folder when it was last listed.
        self._steps: dict[Path, list[Step]] = {}
        self._next_listing = 0.0
        # The lineages whose files were all fetched from the store.
        self._brought: set[LiveLineage] = set()
        # When each pending delta was first seen, by folder.
        self._first_seen: dict[Path, dict[int, float]] = {}
        self._stopping = threading.Event()
        # The folder of the deltas, and the store's URL, which messages show in its place.
        self._shown = str(deltas), str(deltas)
        self.environment = {LIVE_SERVER: self._name, LIVE_DELTAS: str(deltas)}
        self.applied: list[AppliedDeltas] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """During the block, keep a delta writer running while live copies exist."""
        thread = threading.Thread(target=self._keep, name="delta writer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()
            remove_unused_live_copies()

    @contextmanager
    def fetching(
        self, store: DeltaStore, models: Sequence[Path], note_store_read: Callable[[str, float], None]
    ) -> Iterator[None]:
        """Fetch the deltas of live models from a store. During the block, also fetch new ones.

        If the store cannot be reached, this is logged, and the deltas that were fetched earlier are applied.

        Args:
            store: the store of the deltas.
            models: the folders of the models in the repository.
            note_store_read: called with the URL of the store and the time after each read.

        Raises:
            ServerUnavailable: the store cannot be reached, and a lineage was never fetched from it.
            ServingError: a version or the settings of a model cannot be read, or the local folder cannot be written
                to.
        """
        self._shown = str(store.folder), store.url
        began, ended = threading.Event(), threading.Event()
        failed: list[Exception] = []

        def keep() -> None:
            log_problem = LogOnce(
                partial(self._log.warning, "cannot pull deltas: %s", extra={"event": "pull_failed"})
            )
            while not ended.is_set():
                try:
                    if self._bring(store, models):
                        note_store_read(store.url, time.time())
                    log_problem(None)
                except Exception as error:
                    if not began.is_set():
                        failed.append(error)
                        times = [store.last_read(lineage) for model in models for lineage in lineages(model)]
                        if isinstance(error, ServerUnavailable) and None not in times:
                            note_store_read(store.url, min(filter(None, times)))
                            failed.clear()
                    log_problem(str(error))
                finally:
                    began.set()
                ended.wait(_STORE_PERIOD_S)

        threading.Thread(target=keep, name="deltas of the store", daemon=True).start()
        try:
            while not began.wait(_CHECK_PERIOD_S):  # signals are heard meanwhile, also while a store hangs
                pass
            if failed:
                raise failed[0]
            yield
        finally:
            ended.set()  # it is not waited for: a store that hangs would hold up the end

    def _bring(self, store: DeltaStore, models: Sequence[Path]) -> bool:
        """Fetch the new deltas of each lineage: after the state of its copies, or after the last local delta.

        Returns:
            Whether there are lineages, so that the store was asked.

        Raises:
            ServingError: the first error, raised after all lineages were tried.
        """
        sequences: dict[Path, int] = {}
        for copy in self.applied:
            folder = Path(copy.about.deltas)
            sequences[folder] = min(copy.sequence, sequences.get(folder, copy.sequence))
        is_asked, problems = False, []
        for model in models:
            try:
                for lineage in lineages(model):
                    is_asked = True
                    applied = sequences.get(store.folder / lineage.model / lineage.name)
                    if lineage not in self._brought:  # all of it: some may have been squashed since it was here
                        store.bring(lineage.model, lineage.name, lineage.since)
                        self._brought.add(lineage)
                    elif applied is None:
                        store.refresh(lineage)
                    else:
                        store.bring(lineage.model, lineage.name, max(applied - 1, lineage.since))
            except ServingError as problem:  # the other models have nothing to do with it
                problems.append(problem)
        if problems:
            raise problems[0]
        return is_asked

    def _look(self, copies: Iterable[Path]) -> list[AppliedDeltas]:
        if time.monotonic() >= self._next_listing:
            self._next_listing = time.monotonic() + _LIST_PERIOD_S
            self._steps.clear()
        copies_applied = []
        for path in copies:
            with suppress(OSError), state_of(path) as state:  # it was just removed
                copies_applied.append(self._applied(state))
        return copies_applied

    def _applied(self, state: State) -> AppliedDeltas:
        about, sequence = state.about, state.sequence
        folder = Path(about.deltas)
        with suppress(OSError):  # the delta writer says so; or it was removed
            if folder not in self._steps:
                self._steps[folder] = steps_in(folder)
        steps = self._steps.get(folder, [])
        waiting = [step.sequence for step in steps if step.sequence > sequence]
        # By our own clock: a file's time may be another machine's, or the time of the original.
        first_seen = self._first_seen.get(folder, {})
        self._first_seen[folder] = first_seen = {
            number: first_seen.get(number, time.monotonic()) for number in waiting
        }
        since = first_seen[waiting[0]] if waiting else None
        newest = max(waiting, default=sequence)
        stopped = state.stopped.replace(*self._shown)
        sha256 = state.written.get(sequence, "")
        applied = AppliedDeltas(about, sequence, sha256, newest, since, state.rows, state.refused, stopped)
        if not applied.stopped and applied.lag_s > _MISSING_S and reached(steps, sequence) == sequence:
            missing = str(delta_path(folder, sequence + 1)).replace(*self._shown)
            return applied._replace(stopped=f"{missing} is missing, and {waiting[0]} is there")
        return applied

    def metrics(self) -> bytes:
        """The metrics of the copies, in Prometheus' text format."""
        copies = self.applied
        lines = []
        for name, kind, text, value_of in _METRICS:
            if copies:
                lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n")
            lines += [
                f'{name}{{model="{copy.about.model}",version="{copy.about.version}"}} {value_of(copy):.15g}\n'
                for copy in copies
            ]
        return "".join(lines).encode()

    def stopped_lines(self) -> list[str]:
        """A line for each copy to which no further delta is applied."""
        return [
            f"{copy.about.model} {copy.about.version}: deltas are applied up to {copy.sequence}: {copy.stopped}"
            for copy in self.applied
            if copy.stopped
        ]

    def _keep(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        next_start = 0.0
        while not self._stopping.wait(_CHECK_PERIOD_S):
            copies = live_copies(self._name)
            is_running = process is not None and process.poll() is None
            if not is_running and time.monotonic() >= next_start and copies:
                if process is not None:
                    self._log.warning(
                        "the delta writer ended with %d, and is started again",
                        process.returncode,
                        extra={"event": "delta_writer_died"},
                    )
                next_start = time.monotonic() + _START_PERIOD_S
                process = self._start()
            self.applied = self._look(copies)
            self._log_changes()
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "serving.tables.delta_writer", self._name]
        process = subprocess.Popen(
            command,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # or a Ctrl-C would end it before accepted requests are answered
        )
        Output(cast(BinaryIO, process.stdout), self._log, "delta-writer")
        return process

    def _log_changes(self) -> None:
        """Log once that a copy stopped or continues, and from time to time its newest applied delta."""
        for copy in self.applied:
            about = copy.about
            key = about.model, about.version
            where = f"{' '.join(key)}: deltas are applied up to {copy.sequence}"
            fields = {"model": key[0], "version": int(key[1]), "lineage": Path(about.deltas).name}
            fields |= {"sequence": copy.sequence, "sha256": copy.sha256 or None}
            if copy.stopped != self._logged_stops.get(key, ""):
                self._logged_stops[key] = copy.stopped
                if copy.stopped:
                    self._log.error("%s: %s", where, copy.stopped, extra={"event": "deltas_stopped", **fields})
                else:
                    self._log.info("%s: deltas are applied again", where, extra={"event": "deltas_go_on", **fields})
            logged_sequence, next_at = self._logged_sequences.get(key, (None, 0.0))
            if copy.sequence != logged_sequence and time.monotonic() >= next_at:
                self._logged_sequences[key] = copy.sequence, time.monotonic() + _LOG_PERIOD_S
                self._log.info("%s", where, extra={"event": "deltas_applied", **fields})
