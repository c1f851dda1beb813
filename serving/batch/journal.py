"""What a run scores, from what and how: two runs that say the same write the same files."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from serving.batch.inputs import InputFile
from serving.errors import ConfigurationError
from serving.files import UNREADABLE, Strict

JOURNAL = "journal.json"
# The keys of the metadata of each file with scores begin with it.
_PREFIX = b"tbe-serving."
# The key of the metadata of each file with scores that has the SHA-256 of the journal, in hex.
METADATA = _PREFIX + b"journal"


class Journal(Strict, frozen=True):
    """What a run does. The parts that are finished are the files with their names.

    Attributes:
        scores_of: the bundle by its digest, or the server, the model and its version.
        inputs: the files, in order.
        options: what else the scores depend on, by option.
    """

    scores_of: dict[str, str]
    inputs: tuple[InputFile, ...]
    options: dict[str, Any]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of each file with scores."""
        source = {f"{_PREFIX.decode()}{key}": text for key, text in self.scores_of.items()}
        return {METADATA.decode(): self.digest} | source

    @property
    def digest(self) -> str:
        """SHA-256 of the journal, in hex."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def encoded(self) -> bytes:
        """The journal as it is written."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1)


def decode_journal(content: bytes) -> Journal | None:
    """A journal that was written. None: it is none."""
    try:
        return msgspec.json.decode(content, type=Journal)
    except UNREADABLE:
        return None


def check_continues(out: Path | str, earlier: Journal, journal: Journal) -> None:
    """Refuse to go on with a run of something else.

    Args:
        out: the output of both.
        earlier: of the run that did not finish.
        journal: of this run.

    Raises:
        ConfigurationError: naming what differs.
    """
    if earlier == journal:
        return
    raise ConfigurationError(
        f"{out}: an earlier run did not finish, and {change_of_run(earlier, journal)}: run the earlier "
        "command again to go on, or discard what it wrote with --restart"
    )


def other_scores(out: Path | str, container: str, change: str) -> ConfigurationError:
    """The error for an output that has the scores of another run.

    Args:
        out: the output.
        container: what `out` is, such as "folder".
        change: what differs between both runs, as a clause.
    """
    return ConfigurationError(
        f"{out}: has the scores of another run: {change}: name another {container}, or replace them with --restart"
    )


def change_of_file(metadata: Mapping[bytes, bytes], journal: Journal) -> str:
    """What differs between the run that wrote a file and this one, as a clause.

    Args:
        metadata: of the file, which has `Journal.metadata`.
        journal: of this run.
    """
    earlier = {
        key.removeprefix(_PREFIX).decode(): text.decode()
        for key, text in metadata.items()
        if key.startswith(_PREFIX) and key != METADATA
    }
    if earlier != journal.scores_of:
        return _change("where scores come from", earlier, journal.scores_of)
    return "its inputs or options differ"


def change_of_run(earlier: Journal | None, journal: Journal) -> str:
    """What differs first between an earlier run and this one, as a clause. None: its journal cannot be read."""
    if earlier is None:
        return "its journal cannot be read"
    if earlier.scores_of != journal.scores_of:
        return _change("where scores come from", earlier.scores_of, journal.scores_of)
    for name in {**earlier.options, **journal.options}:
        if earlier.options.get(name) != journal.options.get(name):
            return _change(f"--{name}", earlier.options.get(name), journal.options.get(name))
    before, now = ({file.path: _shown(file) for file in run.inputs} for run in (earlier, journal))
    for path in {**before, **now}:
        if before.get(path) != now.get(path):
            return _change(f"the input {path}", before.get(path, "missing"), now.get(path, "missing"))
    return _change("the order of inputs", [*before], [*now])


def _change(what: str, before: object, now: object) -> str:
    return f"{what} changed: it was {before}, and is {now}"


def _shown(file: InputFile) -> str:
    tag = f", ETag {file.e_tag}" if file.e_tag else ""
    return f"{file.size_bytes} bytes with footer {file.footer[:12]}…{tag}"
