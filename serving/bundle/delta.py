"""Deltas: files of changed rows, which a running server applies to the tables that it serves.

`serving.bundle.lineage` names the files and their folder. A delta is a safetensors file
(https://github.com/huggingface/safetensors, "Format"). It has two tensors for each table that changes: `TABLE/ids`,
int64 [n], the sorted, distinct row numbers; and `TABLE/rows`, uint8 [n, row bytes], the whole rows as
`serving.bundle.formats` stores them. Its metadata are `format` ("1"), `lineage`, `sequence` (its number),
`written_at` (Unix time in seconds) and `sha256`, all as text. `sha256` is the SHA-256 of the file with 64 zeros in
place of these hex digits. If one bit of the file changes, the delta is refused.

Several deltas may be *squashed* into one file, which has the newest state of each row. Its `sequence` is the number
of the last delta. It has two more metadata: `since`, the number before the first delta, and `last_sha256`, the
`sha256` of the last delta. It can be applied after any delta from `since` on: the rows that it repeats are the same
or newer.

For a model on several hosts, the router and each host have their own deltas, under the same numbers, with the rows
and columns that they hold. Such a delta may have no rows.

A signature signs the line `tbe-serving/1 000000000001.safetensors "MODEL" "LINEAGE"`, a newline, and the file; see
`serving.bundle.signature`.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from serving.bundle.formats import Bytes
from serving.bundle.lineage import Step, delta_path, delta_signature, steps_in
from serving.bundle.manifest import Manifest
from serving.bundle.tables import Table
from serving.errors import BundleError, shown
from serving.files import UNREADABLE, Strict, json_tree, read_file

if TYPE_CHECKING:
    from serving.bundle.signature import TrustedKeys

FORMAT = "1"
# Stands for a delta's SHA-256 while it is computed.
NO_SHA256 = "0" * 64
# The names of the two tensors of a table.
IDS_SUFFIX, ROWS_SUFFIX = "/ids", "/rows"
# Maximum bytes of the header, as in safetensors itself.
_MOST_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MOST_ROWS = 2**48
# Maximum bytes of a file without its rows, and the bytes of a row's number.
_NAMES_BYTES, _ID_BYTES = 1 << 20, 8


def tables_in(tensors: Collection[str]) -> set[str] | None:
    """The tables with row numbers and rows in a file, by its tensors' names, or None if there are other tensors."""
    names = {name.removesuffix(IDS_SUFFIX) for name in tensors if name.endswith(IDS_SUFFIX)}
    return names if {*tensors} == {f"{name}{what}" for name in names for what in (IDS_SUFFIX, ROWS_SUFFIX)} else None


def sha256_text(digest: str) -> bytes:
    """The text of the SHA-256 in the header of a delta. Names cannot contain it, because their quotes are escaped."""
    return f'"sha256":"{digest}"'.encode()


def read_delta(path: Path, manifest: Manifest) -> bytes:
    """The bytes of a delta.

    Raises:
        BundleError: the file cannot be read, or is larger than a delta of the manifest's tables can be.
    """
    rows_bytes = sum(table.rows * (table.row_bytes + _ID_BYTES) for table in manifest.tables)
    try:
        return read_file(path, _NAMES_BYTES + rows_bytes)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error


class ChangedRows(NamedTuple):
    """Changed rows of a table: `ids` int64 [n], sorted, each once; `rows` uint8 [n, row bytes]."""

    ids: npt.NDArray[np.int64]
    rows: Bytes

    @classmethod
    def concatenated(cls, parts: Sequence["ChangedRows"]) -> "ChangedRows":
        """Concatenate rows of a table."""
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate([part.rows for part in parts]))


class Delta(NamedTuple):
    """A delta, or several that were squashed.

    Attributes:
        sequence: the number of the delta; of a squashed delta, the last number.
        written_at: when it was written, in Unix time.
        tables: changed rows by table.
        digest: its `sha256`.
        last_digest: `last_sha256` of a squashed delta, or else `digest`.
    """

    sequence: int
    written_at: float
    tables: Mapping[str, ChangedRows]
    digest: str
    last_digest: str


_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class _Metadata(Strict, frozen=True):
    format: Literal["1"]
    lineage: str
    sequence: Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,11}$")]
    written_at: Annotated[str, msgspec.Meta(pattern=r"^-?[0-9]{1,12}(\.[0-9]{1,9})?$")]
    sha256: _Sha256
    since: Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9][0-9]{0,11})$")] | None = None
    last_sha256: _Sha256 | None = None

    def __post_init__(self) -> None:
        if (self.since is None) != (self.last_sha256 is None) or self.step.is_squashed != (self.since is not None):
            raise ValueError("expected `since` and `last_sha256` where several deltas are squashed, and only there")

    @property
    def step(self) -> Step:
        sequence = int(self.sequence)
        return Step(sequence, sequence - 1 if self.since is None else int(self.since))


class _Tensor(Strict, frozen=True):
    dtype: Literal["I64", "U8"]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=_MOST_ROWS)], ...], msgspec.Meta(max_length=2)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def parse_delta(path: Path, content: bytes, manifest: Manifest, lineage: str, step: Step) -> Delta:
    """A delta from the bytes of its file. Nothing is copied.

    Args:
        path: the path of the file, for errors.
        content: its bytes.
        manifest: the manifest of a bundle of the lineage.
        lineage: the expected lineage.
        step: the expected numbers.

    Raises:
        BundleError: the file is not a delta or not the expected one, its bytes changed since it was written, or a row
            does not fit its table.
    """
    metadata, tensors, data = _unpacked(path, content)
    if (metadata.lineage, metadata.step) != (lineage, step):
        raise BundleError(
            f"{path}: expected {step} of lineage {lineage}, got {metadata.step} of "
            f"{metadata.lineage[:64]!r}: {_AGAIN}"
        )
    arrays = _arrays(path, tensors, data)
    tables = {table.name: table for table in manifest.tables}
    names = tables_in(arrays)
    if names is None:
        raise BundleError(
            f"{path}: expected {IDS_SUFFIX!r} and {ROWS_SUFFIX!r} of each table, got "
            f"{shown(str(sorted(arrays)))}: {_AGAIN}"
        )
    if unknown := names - tables.keys():
        raise BundleError(f"{path}: expected tables of the model, got {min(unknown)!r}: {_AGAIN}")
    changed = {name: ChangedRows(arrays[name + IDS_SUFFIX], arrays[name + ROWS_SUFFIX]) for name in sorted(names)}
    for name, rows in changed.items():
        if problem := _problem_of(rows, tables[name]):
            raise BundleError(f"{path}: table {name!r}: {problem}: {_AGAIN}")
    last = metadata.last_sha256 or metadata.sha256
    return Delta(step.sequence, float(metadata.written_at), changed, metadata.sha256, last)


def open_delta(folder: Path, step: Step, manifest: Manifest, trusted: "TrustedKeys | None" = None) -> Delta:
    """A delta of a lineage, read and checked.

    Args:
        folder: the folder of the lineage, <deltas>/<model>/<lineage>.
        step: the numbers of the delta.
        manifest: the manifest of a bundle of the lineage.
        trusted: one of these keys must have signed the delta. None: no signature is needed.

    Raises:
        BundleError: the file cannot be read, has no signature by one of the keys, or as for `parse_delta`.
    """
    path = delta_path(folder, *step)
    content = read_delta(path, manifest)
    if trusted is not None:
        trusted.check_delta(path, content, delta_signature(path, content), folder.parent.name, folder.name)
    return parse_delta(path, content, manifest, folder.name, step)


def find_step(folder: Path, sequence: int, digest: str, manifest: Manifest, *, as_last: bool) -> Step | None:
    """The step in a lineage's folder that ends with the delta `sequence`, found by its digest.

    Args:
        as_last: also accept a squashed delta whose last delta has this digest.

    Returns:
        The step, or None if no such file exists, or its bytes changed since it was written.
    """
    for step in steps_in(folder):
        if step.sequence == sequence:
            path = delta_path(folder, *step)
            with suppress(BundleError):
                metadata, *_ = _unpacked(path, read_delta(path, manifest))
                digests = (metadata.sha256, metadata.last_sha256) if as_last else (metadata.sha256,)
                if metadata.step == step and digest in digests:
                    return step
    return None


def _unpacked(path: Path, content: bytes) -> tuple[_Metadata, dict[str, _Tensor], memoryview]:
    """The metadata and tensors in the header of a delta, and the bytes after it.

    Raises:
        BundleError: the file is not a delta, or its bytes changed since it was written.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < _LENGTH_BYTES or length > min(_MOST_HEADER_BYTES, len(content) - _LENGTH_BYTES):
        raise BundleError(f"{path}: expected a delta, got {len(content)} bytes that are no safetensors: {_AGAIN}")
    header, data = content[_LENGTH_BYTES : _LENGTH_BYTES + length], memoryview(content)[_LENGTH_BYTES + length :]
    try:
        json_tree(header)  # refuses repeated keys
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=_Metadata)
        tensors = {name: msgspec.json.decode(tensor, type=_Tensor) for name, tensor in raw.items()}
    except (*UNREADABLE, ValueError) as error:
        raise BundleError(f"{path}: expected the header of a delta: {error}: {_AGAIN}") from error
    as_hashed = header.replace(sha256_text(metadata.sha256), sha256_text(NO_SHA256))
    hashed = hashlib.sha256(content[:_LENGTH_BYTES] + as_hashed)
    hashed.update(data)
    if hashed.hexdigest() != metadata.sha256:
        raise BundleError(
            f"{path}: expected bytes of SHA-256 {metadata.sha256}, as it says, got {hashed.hexdigest()}: they were "
            f"changed: {_AGAIN}"
        )
    return metadata, tensors, data


_AGAIN = "copy it again, or remove it and all after it, and publish what changed"
_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "U8": np.dtype("u1")}


def _arrays(path: Path, tensors: Mapping[str, _Tensor], data: memoryview) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a file.

    Raises:
        BundleError: the tensors leave gaps, overlap, or do not fill the file.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    start = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        dtype, size = _DTYPES[tensor.dtype], math.prod(tensor.shape)
        stop = start + size * dtype.itemsize
        if tensor.data_offsets != (start, stop) or stop > len(data):
            raise BundleError(
                f"{path}: {name[:64]!r}: expected bytes {start} to {stop}, within the {len(data)} that there are, "
                f"got {tensor.data_offsets}: {_AGAIN}"
            )
        array = np.frombuffer(data, np.uint8, stop - start, start)
        # int64 that is not aligned to 8 bytes works on x86-64 and ARM, but is slower.
        arrays[name] = array.view(dtype).reshape(tensor.shape)
        start = stop
    if start != len(data):
        raise BundleError(f"{path}: expected {start} bytes of tensors, got {len(data)}: {_AGAIN}")
    return arrays


def _problem_of(changed: ChangedRows, table: Table) -> str | None:
    """What is wrong with changed rows of a table, or None."""
    ids, rows = changed
    if ids.dtype != np.int64 or ids.ndim != 1 or rows.dtype != np.uint8 or rows.shape != (len(ids), table.row_bytes):
        return (
            f"expected ids int64 [n] and rows uint8 [n, {table.row_bytes}], got {ids.dtype} {[*ids.shape]} and "
            f"{rows.dtype} {[*rows.shape]}"
        )
    if table.id_map is not None:
        return "its rows are named by raw ids, whose map a delta cannot change: export the model again"
    if not len(ids):
        return "expected at least one row, got none"
    # Compared, not subtracted: differences of int64 may overflow.
    if ids[0] < 0 or ids[-1] >= table.rows or (ids[1:] <= ids[:-1]).any():
        return f"expected row numbers in [0, {table.rows}), sorted, each once"
    finite = np.isfinite(table.dtype.format.stored_floats(rows))
    if finite.all():  # much faster than row by row
        return None
    return f"row {int(ids[finite.all(axis=1).argmin()])} holds NaN or infinity"
