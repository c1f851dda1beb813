"""Scores in a folder, which appears when all parts are finished.

Until then they are in a hidden folder beside it.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyarrow import ArrowException
from pyarrow.parquet import read_metadata

from serving.batch.inputs import Part
from serving.batch.journal import (
    JOURNAL,
    METADATA,
    Journal,
    change_of_file,
    check_continues,
    decode_journal,
    other_scores,
)
from serving.errors import ConfigurationError
from serving.files import make_content, put_in_place, read_file, replacing, sync_folder

# Files of this size and more are left out of the page cache, in bytes.
_LARGE_BYTES = 64 << 20
_MOST_JOURNAL_BYTES = 1 << 30


@dataclass(frozen=True)
class FolderOutput:
    """An `Output` in a folder.

    Attributes:
        out: its path, absolute.
        is_partitioned: whether a part is several files, in folders by the values of columns.
    """

    out: Path
    is_partitioned: bool = False

    @property
    def errors(self) -> str:
        """The file that names the rows without scores."""
        return str(self.out.with_name(f"{self.out.name}.errors.jsonl"))

    @property
    def _hidden(self) -> Path:
        return self.out.with_name(f".{self.out.name}.scoring")

    @property
    def _scores(self) -> Path:
        return self._hidden / "scores"

    @property
    def _errors(self) -> Path:
        return self._hidden / "errors"

    @property
    def _finished(self) -> Path:
        """The folder with a file for each finished part, under the part's name."""
        return self._hidden / "finished" if self.is_partitioned else self._scores

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make and lock the hidden folder, which is removed when the block ends well."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            yield
            shutil.rmtree(self._hidden)
        finally:
            with suppress(OSError):
                self._hidden.rmdir()  # a run that was refused wrote nothing
            os.close(lock)

    def _lock(self) -> int:
        """The descriptor that holds the lock."""
        while True:
            self._hidden.mkdir(exist_ok=True)
            lock = os.open(self._hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                raise ConfigurationError(
                    f"{self.out}: another run writes it: wait for its end, or name another"
                ) from error
            if self._hidden.exists() and os.path.samestat(os.fstat(lock), self._hidden.stat()):
                return lock
            os.close(lock)  # another run finished, and removed it, before it was locked

    def is_finished(self, journal: Journal, *, restart: bool) -> bool:
        """As `Output`. An output is recognised by the metadata of one of its files."""
        if not os.path.lexists(self.out):
            return False
        metadata: dict[bytes, bytes] = {}
        with suppress(ArrowException, OSError, StopIteration):
            metadata = read_metadata(next(self.out.rglob("part-*.parquet"))).metadata or {}
        if METADATA not in metadata:
            raise ConfigurationError(f"{self.out}: expected no such file or folder, or earlier scores: name another")
        finished = metadata[METADATA].decode() == journal.digest
        if not finished and not restart:
            raise other_scores(self.out, "folder", change_of_file(metadata, journal))
        return finished

    def prepare(self, journal: Journal, parts: Sequence[Part], *, skips_bad_rows: bool, restart: bool) -> set[str]:
        """As `Output`."""
        earlier = None
        with suppress(FileNotFoundError):
            earlier = decode_journal(read_file(self._hidden / JOURNAL, _MOST_JOURNAL_BYTES))
        if earlier is not None and not restart:
            check_continues(self.out, earlier, journal)
        for path in self._hidden.iterdir():
            if earlier == journal and path.name in (JOURNAL, "scores", "errors", "finished"):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if earlier != journal:
            with replacing(self._hidden / JOURNAL) as file:
                file.write(journal.encoded())
        for folder in (self._scores, self._errors, self._finished):
            folder.mkdir(exist_ok=True)
        if not skips_bad_rows:
            for part in parts:
                if (self._errors / part.errors_name).exists():  # a run with --on-error skip finished it
                    (self._finished / part.name).unlink(missing_ok=True)
        _remove_files(self._errors, but={part.errors_name for part in parts})
        _remove_files(self._finished, but={part.name for part in parts})  # and drafts of a run that was killed
        finished = {path.name for path in self._finished.iterdir()}
        if self.is_partitioned:
            _remove_files(self._scores, but=finished)
        return finished

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """As `Output`."""
        path = self._scores / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return replacing(path)

    def write_errors(self, name: str, lines: bytes) -> None:
        """As `Output`."""
        (self._errors / name).unlink(missing_ok=True)
        if lines:
            with replacing(self._errors / name) as file:
                file.write(lines)

    def finish(self, name: str, files: Sequence[str]) -> None:
        """As `Output`. The part's files are synced first, so that a power cut cannot lose them afterwards."""
        for folder in {folder for file in files for folder in Path(file).parents}:
            sync_folder(self._scores / folder)
        with replacing(self._finished / name):
            pass

    def publish(self, journal: Journal, parts: Sequence[Part]) -> None:  # noqa: ARG002
        """Name the rows without scores in one file, and give the folder its name."""
        files = [path for part in parts if (path := self._errors / part.errors_name).exists()]
        if files:
            with replacing(Path(self.errors)) as file:
                for path in files:
                    file.write(path.read_bytes())
        else:
            make_content(Path(self.errors), None)
        if self.out.exists():  # with --restart
            self.out.rename(self._hidden / "replaced")
        put_in_place(self._scores, self.out, _LARGE_BYTES)

    def skipped_rows(self) -> int:
        """As `Output`."""
        with suppress(FileNotFoundError), Path(self.errors).open("rb") as file:
            return sum(1 for _ in file)
        return 0


def _remove_files(folder: Path, *, but: Collection[str]) -> None:
    """Remove the files below a folder, except those with the names in `but`."""
    for path in folder.rglob("*"):
        if path.name not in but and path.is_file():
            path.unlink()
