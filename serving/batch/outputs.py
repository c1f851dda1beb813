"""Where scores are written: what finished and what did not is there, so that a run that is started again goes on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

from serving.batch.inputs import Part
from serving.batch.journal import Journal


class Output(Protocol):
    """The files with the scores of one run. Other processes of the run have copies of the object."""

    @property
    def errors(self) -> str:
        """What names the rows without scores, once the output is whole."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other runs from writing it until the block ends, where that can be known.

        Raises:
            ConfigurationError: another run writes it.
        """

    def is_finished(self, journal: Journal, *, restart: bool) -> bool:
        """Whether the scores of this run are there.

        Raises:
            ConfigurationError: something else is there, which is not to be replaced.
        """

    def prepare(self, journal: Journal, parts: Sequence[Part], *, skips_bad_rows: bool, restart: bool) -> set[str]:
        """Remove what no run of this journal finished.

        Args:
            journal: of this run.
            parts: of this run.
            skips_bad_rows: if not, parts with such rows are not finished.
            restart: whether to remove what another run left.

        Returns:
            The names of the parts that are finished.

        Raises:
            ConfigurationError: another run left something.
        """

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file for scores, which appears whole when the block ends without an error.

        Args:
            name: the name of a part, which is finished afterwards; or in a partitioned output, the name of one of the
                part's files, such as day=2026-11-01/part-00000.parquet.
        """

    def write_errors(self, name: str, lines: bytes) -> None:
        """Write the rows of a part that have no scores, or remove those of an earlier try."""

    def finish(self, name: str, files: Sequence[str]) -> None:
        """Record in a partitioned output that a part is finished.

        Args:
            name: the name of the part.
            files: the names of its files, all of which are written.
        """

    def publish(self, journal: Journal, parts: Sequence[Part]) -> None:
        """Make the whole output appear."""

    def skipped_rows(self) -> int:
        """How many rows have no scores in an output that is whole."""
