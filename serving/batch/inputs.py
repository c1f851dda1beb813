"""The files that a run scores, and the parts that it scores them in."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from serving.batch.objects import READ_BYTES, ObjectState, find_objects, split_url
from serving.errors import ConfigurationError
from serving.files import Strict, is_url

# The end of a Parquet file: the size of the footer in four bytes, and a magic number.
_END_BYTES = 8
# Pages are read one after the other, so that a row group of any size takes little memory.
_BUFFER_BYTES = 1 << 20


class InputFile(Strict, frozen=True):
    """A Parquet file.

    Attributes:
        path: absolute, or the URL of an object.
        size_bytes: its size.
        footer: SHA-256 of its footer, which says where its columns are and what they hold, in hex.
        rows: of each row group.
        e_tag: of an object. "": it is a file, or its store has no ETags.
    """

    path: str
    size_bytes: int
    footer: str
    rows: tuple[int, ...]
    e_tag: str = ""

    def open(self) -> ParquetFile:
        """Open the file.

        Raises:
            ConfigurationError: as `check_unchanged`.
        """
        self.check_unchanged()
        return self._parquet()

    def check_unchanged(self) -> None:
        """Refuse a file that has changed.

        Raises:
            ConfigurationError: it is another file than it was.
        """
        if read_input(self.path) != self:
            raise ConfigurationError(f"{self.path}: changed while it was scored: start again with --restart")

    @property
    def schema(self) -> Any:
        """Its columns, as a pyarrow Schema."""
        with self._parquet() as parquet:
            return parquet.schema_arrow

    def _parquet(self) -> ParquetFile:
        return open_parquet(self.path, ObjectState(self.size_bytes, self.e_tag))


class Part(Strict, frozen=True):
    """A row group, whose scores are one file.

    Attributes:
        number: of the part, from 0.
        file: the file that it is of.
        row_group: its number in the file. A file without row groups has one part without rows.
    """

    number: int
    file: InputFile
    row_group: int

    @property
    def name(self) -> str:
        """The name of the file with its scores."""
        return f"part-{self.number:05}.parquet"

    @property
    def errors_name(self) -> str:
        """The name of the file with its rows that have no scores."""
        return f"{self.name}.jsonl"

    @property
    def rows(self) -> int:
        """Its number of rows."""
        return self.file.rows[self.row_group] if self.file.rows else 0


def find_inputs(patterns: Sequence[str]) -> list[InputFile]:
    """The Parquet files and objects that are named by files, folders, globs and URLs, in that order.

    A folder has the files *.parquet below it, except those whose path in it has a name that begins with "." or "_".

    Raises:
        ConfigurationError: naming what has no file, is no Parquet file, or is named twice.
    """
    paths = [path for pattern in patterns for path in (find_objects if is_url(pattern) else _paths_of)(pattern)]
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise ConfigurationError(f"{twice[0]}: expected each file once, got it twice")
    return [read_input(path) for path in paths]


def check_outside(out: str, patterns: Sequence[str], files: Sequence[InputFile]) -> None:
    """Refuse an output inside the inputs, because the next run would read its scores as inputs.

    Args:
        out: an absolute path, or a URL.
        patterns: as for `find_inputs`.
        files: the files that the patterns name.

    Raises:
        ConfigurationError: an input folder contains the output, or an input is a file of it. The message names it.
    """
    folder = _with_slash(out)
    containing = [pattern for pattern in patterns if folder.startswith(_with_slash(pattern))]
    contained = [file.path for file in files if _with_slash(file.path).startswith(folder)]
    for name in (*containing, *contained):
        raise ConfigurationError(
            f"{out}: expected an output outside of the inputs, got the input {name}: name another"
        )


def _with_slash(path: str) -> str:
    """A URL, or an absolute path without links, with "/" at its end."""
    return (path if is_url(path) else os.path.realpath(path)).rstrip("/") + "/"


def parts_of(files: Sequence[InputFile]) -> list[Part]:
    """The parts of files, in order."""
    groups = [(file, group) for file in files for group in range(max(1, len(file.rows)))]
    return [Part(number=number, file=file, row_group=group) for number, (file, group) in enumerate(groups)]


def read_input(path: str) -> InputFile:
    """What a Parquet file is, from its footer.

    Raises:
        ConfigurationError: it is no Parquet file.
        ServerUnavailable: its store cannot be reached, or refuses access.
        OSError: it cannot be read.
    """
    if is_url(path):
        bucket, name = split_url(path)
        state = bucket.state(name)
        if state is None:
            raise ConfigurationError(f"{path}: expected a Parquet file: the object is missing")
        file: Any = bucket.open(name, state)
    else:
        file = open(path, "rb")  # noqa: SIM115  it is closed below
        state = ObjectState(os.fstat(file.fileno()).st_size, "")
    with file:
        file.seek(max(0, state.size_bytes - _END_BYTES))
        footer_bytes = _END_BYTES + int.from_bytes(file.read(4), "little")
        file.seek(max(0, state.size_bytes - footer_bytes))
        footer = hashlib.sha256(file.read(footer_bytes)).hexdigest()
    with open_parquet(path, state) as parquet:
        metadata = parquet.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return InputFile(path=path, size_bytes=state.size_bytes, e_tag=state.e_tag, footer=footer, rows=rows)


def open_parquet(path: str, state: ObjectState) -> Any:
    """A ParquetFile that holds a few pages of each column in memory.

    Args:
        path: of a file or an object.
        state: of the object. Once it changes, reads fail.

    Raises:
        ConfigurationError: it is no Parquet file, or the object has changed.
    """
    source: Any = path
    if is_object := is_url(path):
        bucket, name = split_url(path)
        source = bucket.open(name, state)
    try:
        return ParquetFile(source, buffer_size=READ_BYTES if is_object else _BUFFER_BYTES, pre_buffer=False)
    except ArrowException as error:
        raise ConfigurationError(f"{path}: expected a Parquet file: {error}") from error


def _paths_of(pattern: str) -> Iterator[str]:
    pattern = os.path.abspath(pattern)
    if os.path.isfile(pattern):
        return iter([pattern])
    if os.path.isdir(pattern):
        folder = Path(pattern)
        paths = [
            str(path)
            for path in sorted(folder.rglob("*.parquet"))
            if path.is_file() and not any(name.startswith((".", "_")) for name in path.relative_to(folder).parts)
        ]
    else:
        paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        raise ConfigurationError(f"{pattern}: expected Parquet files: a file, a folder with *.parquet, or a glob")
    return iter(paths)
