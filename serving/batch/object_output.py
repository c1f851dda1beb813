"""Scores below the URL of an object store. `_SUCCESS` is written last: without it, the scores are not whole.

A store renames nothing. A part appears when it is finished, and nothing is kept on this machine, so that a run can go
on from another one. Readers such as Spark leave out names that begin with "_".
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryFile, gettempdir
from typing import BinaryIO

from serving.batch.inputs import Part
from serving.batch.journal import Journal, change_of_run, check_continues, decode_journal, other_scores
from serving.batch.objects import Objects, ObjectState, objects_of
from serving.errors import ConfigurationError
from serving.files import naming_full_disk

SUCCESS = "_SUCCESS"
_JOURNAL = "_journal.json"
# Below it, the rows of each part that have no scores.
_ERRORS = "_errors"
# Below it, an object for each part that is finished, if the output is partitioned.
_FINISHED = "_finished"


@dataclass(frozen=True)
class ObjectOutput:
    """An `Output` below a URL.

    Other runs are not locked out. Two runs of one journal write the same objects. A run stops before its next object
    if a run with --restart has replaced its journal.

    Attributes:
        url: such as s3://bucket/scores, without "/" at its end.
        journal_digest: the digest of this run's journal.
        is_partitioned: whether a part is several objects, below prefixes by the values of columns.
    """

    url: str
    journal_digest: str
    is_partitioned: bool = False

    @property
    def errors(self) -> str:
        """The prefix of the objects that name the rows without scores."""
        return f"{self.url}/{_ERRORS}"

    @property
    def _objects(self) -> Objects:
        return objects_of(self.url)

    def locked(self) -> AbstractContextManager[None]:
        """Nothing is locked."""
        return nullcontext()

    def is_finished(self, journal: Journal, *, restart: bool) -> bool:
        """As `Output`. An output is recognised by its journal."""
        names = self._objects.states()
        if names and _JOURNAL not in names:
            raise ConfigurationError(f"{self.url}: expected no objects, or earlier scores: name another prefix")
        if SUCCESS not in names:
            return False
        finished = self._objects.read(SUCCESS) == _success(journal)
        if not finished and not restart:
            earlier = decode_journal(self._objects.read(_JOURNAL) or b"")
            raise other_scores(self.url, "prefix", change_of_run(earlier, journal))
        return finished

    def prepare(self, journal: Journal, parts: Sequence[Part], *, skips_bad_rows: bool, restart: bool) -> set[str]:
        """As `Output`."""
        names = set(self._objects.states())
        earlier = decode_journal(self._objects.read(_JOURNAL) or b"") if _JOURNAL in names else None
        if earlier is not None and not restart:
            check_continues(self.url, earlier, journal)
        errors = {part.name: f"{_ERRORS}/{part.errors_name}" for part in parts}
        finished = {part.name for part in parts if self._finished(part.name) in names and earlier == journal}
        # A run with --on-error skip finished these parts without their bad rows.
        incomplete = set() if skips_bad_rows else {part for part in finished if errors[part] in names}
        finished -= incomplete
        if earlier != journal:
            # Without _SUCCESS, readers ignore the objects that are left; without the parts, runs do.
            self._objects.delete(names & {SUCCESS})
            self._objects.delete(name for name in sorted(names) if _is_ours(name))
            self._objects.write(_JOURNAL, journal.encoded())
        else:
            # Objects of unfinished parts stay: this run, or another one of the same journal, writes the same bytes.
            bases = {name for part in incomplete for name in (part, f"{part}.jsonl")}
            incomplete_names = {name for name in names if _is_ours(name) and name.rpartition("/")[2] in bases}
            self._objects.delete(sorted(incomplete_names))
        return finished

    def _finished(self, name: str) -> str:
        """The object whose existence means that a part is finished."""
        return f"{_FINISHED}/{name}" if self.is_partitioned else name

    def _check_journal(self) -> None:
        """Refuse to write into the output of another run.

        Raises:
            ConfigurationError: a run with --restart replaced the journal.
        """
        state = self._objects.state(_JOURNAL)
        if state is None or _digest_of_journal(self.url, state) != self.journal_digest:
            raise ConfigurationError(
                f"{self.url}: a run with --restart took this prefix while this one wrote it: name another prefix"
            )

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """As `Output`. The part is on this machine until it is finished."""
        with naming_full_disk(gettempdir()), TemporaryFile() as file:
            yield file
            self._check_journal()
            self._objects.write_file(name, file)

    def write_errors(self, name: str, lines: bytes) -> None:
        """As `Output`. An earlier attempt wrote the same lines."""
        if lines:
            self._objects.write(f"{_ERRORS}/{name}", lines)

    def finish(self, name: str, files: Sequence[str]) -> None:  # noqa: ARG002
        """As `Output`."""
        self._check_journal()
        self._objects.write(self._finished(name), b"")

    def publish(self, journal: Journal, parts: Sequence[Part]) -> None:
        """Write `_SUCCESS`."""
        self._check_journal()
        self._objects.write(SUCCESS, _success(journal))
        if self.is_partitioned:
            self._objects.delete(self._finished(part.name) for part in parts)

    def skipped_rows(self) -> int:
        """As `Output`."""
        return sum((self._objects.read(name) or b"").count(b"\n") for name in self._objects.states(_ERRORS))


@cache
def _digest_of_journal(url: str, state: ObjectState) -> str | None:  # noqa: ARG001
    """The digest of the journal below a URL, read once for each state of the object."""
    journal = decode_journal(objects_of(url).read(_JOURNAL) or b"")
    return None if journal is None else journal.digest


def _success(journal: Journal) -> bytes:
    return f'{{"journal_sha256": "{journal.digest}"}}\n'.encode()


def _is_ours(name: str) -> bool:
    """Whether a run writes an object of this name, apart from its journal and `_SUCCESS`."""
    *folders, base = name.split("/")
    is_part = base.startswith("part-") and base.endswith(".parquet") and all("=" in folder for folder in folders)
    return is_part or folders in ([_ERRORS], [_FINISHED])
