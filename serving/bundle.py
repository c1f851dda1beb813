"""The bundle on disk: what export writes and serving loads.

A bundle is one Triton model version::

    model.py             from serving.backend import TritonPythonModel
    manifest.json        the types below, as JSON
    program.pt           TorchScript; holds no weights
    weights.<rank>.bin   the rows of that rank's shards, exactly as FBGEMM's TBE kernel reads them
    manifest.sig         who published it, if that was to be known: serving/signature.py

A row is `dim` FP32 or FP16 numbers, or, for the INT types, FBGEMM's fused row: FP16 scale, FP16 bias, then
`dim` codes, the lower bits first (https://github.com/pytorch/FBGEMM, QuantUtils). value = code × scale + bias.
"""

import enum
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from serving.digests import FileDigest, check_digest, check_size
from serving.errors import BundleError
from serving.files import open_file, read_file
from serving.plan import Plan, Shard, tiling_error
from serving.strict import UNREADABLE, Strict

if TYPE_CHECKING:  # cryptography is of no use to a client
    from serving.signature import TrustedKeys

FORMAT_VERSION = 4
# Before 4 a feature was its own key, and nothing was said of what was left out, or of the model's own answers.
_READABLE_VERSIONS = (3, FORMAT_VERSION)
MANIFEST = "manifest.json"
PROGRAM = "program.pt"
MODEL = "model.py"
# What kernels read the rows; other devices pack them otherwise.
DEVICE = "cpu"
# Shards start on a cache line pair, as FBGEMM's own allocator places tables.
SHARD_ALIGNMENT = 128

_QPARAMS_BYTES = 4


class WeightDtype(enum.Enum):
    """How a row is stored; the names are FBGEMM's SparseType's."""

    FP32 = "FP32"
    FP16 = "FP16"
    INT8 = "INT8"
    INT4 = "INT4"
    INT2 = "INT2"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return int(self.value.lstrip("FPINT"))

    @property
    def quantized(self) -> bool:
        """Whether a row carries a scale and a bias."""
        return self.value.startswith("INT")

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements at row alignment 1, scale and bias included."""
        return dim * self.bits // 8 + (_QPARAMS_BYTES if self.quantized else 0)


class Pooling(enum.Enum):
    """How the rows of a bag become one; an empty bag gives zeros."""

    SUM = "SUM"
    MEAN = "MEAN"


class IdPolicy(enum.Enum):
    """What happens to an id outside [0, rows): refuse the request, or let the id contribute nothing."""

    ERROR = "error"
    ZERO = "zero"


class DefaultRow(Strict, frozen=True):
    """The third id policy: an id outside [0, rows) reads this row instead, and MEAN counts it."""

    default_row: int

    @property
    def value(self) -> str:
        """As `--id-policy` takes it."""
        return f"default_row:{self.default_row}"


class OutputDtype(enum.Enum):
    """The dtype of the pooled embeddings, by its KServe name."""

    FP32 = "FP32"
    FP16 = "FP16"


class Feature(Strict, frozen=True, omit_defaults=True):
    """A part of the answer: the bags of a key of the request, looked up in a table.

    Attributes:
        shared_key: the key, where several tables read it; else it is called as the feature is.
    """

    name: str
    table: str
    shared_key: str | None = None

    @property
    def key(self) -> str:
        """The key of the request, TorchRec's KJT key."""
        return self.name if self.shared_key is None else self.shared_key


class Table(Strict, frozen=True):
    """One embedding matrix. `weighted`: its ids carry weights."""

    name: str
    rows: int
    dim: int
    pooling: Pooling
    weighted: bool
    dtype: WeightDtype
    id_policy: IdPolicy | DefaultRow

    @property
    def row_bytes(self) -> int:
        """Bytes of one whole row."""
        return self.dtype.row_bytes(self.dim)

    @property
    def policy_error(self) -> str | None:
        """What is wrong with the id policy; None where nothing is."""
        policy = self.id_policy
        if isinstance(policy, DefaultRow) and not 0 <= policy.default_row < self.rows:
            return f"id policy default_row: expected a row in [0, {self.rows}), got {policy.default_row}"
        return None

    def shard_bytes(self, shard: Shard) -> int:
        """Bytes of a shard of this table; every block of columns has a scale and a bias of its own."""
        return shard.height * self.dtype.row_bytes(shard.width)


class Agreement(Strict, frozen=True):
    """How two versions of one table's numbers agree: |a − b| at most and on average, cosine, the row furthest off."""

    largest: float
    mean: float
    cosine: float
    worst_row: int


class Parity(Strict, frozen=True, omit_defaults=True):
    """How far one table's numbers moved at each step of the export.

    `quantized` compares the table's float rows with its stored ones; no element moved by more than `limit`. The
    others compare answers to a probe, so that a row is a sample: `sharded` the program before compiling with
    numpy's reading of the shards, `scripted` TorchScript with that, `reloaded` the published files in another
    process with that. `trained` compares the trained module itself, run by TorchRec, with `reloaded`; None where it
    could not be run.
    """

    table: str
    limit: float
    quantized: Agreement
    sharded: Agreement
    scripted: Agreement
    reloaded: Agreement
    trained: Agreement | None = None


class Manifest(Strict, frozen=True):
    """What a bundle holds.

    Attributes:
        features: the default order of an answer. Those of one key are side by side, and their keys are the default
            order of a request.
        exported_at: seconds of Unix time.
        left_out: what of the trained module is not in the bundle.
        notes: what whoever serves it should know.
    """

    format_version: int
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]
    output_dtype: OutputDtype
    plan: Plan
    parity: tuple[Parity, ...]
    exported_at: float
    versions: dict[str, str]
    files: dict[str, FileDigest]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def keys(self) -> dict[str, tuple[Feature, ...]]:
        """The features of each key of a request, in feature order."""
        by_key: dict[str, tuple[Feature, ...]] = {}
        for feature in self.features:
            by_key[feature.key] = (*by_key.get(feature.key, ()), feature)
        return by_key

    @property
    def weighted_keys(self) -> tuple[str, ...]:
        """The keys whose ids carry weights: a table that takes them reads them."""
        weighted = {table.name for table in self.tables if table.weighted}
        return tuple(key for key, read in self.keys.items() if any(each.table in weighted for each in read))

    @property
    def rows_of_keys(self) -> dict[str, int]:
        """How many ids of each key are in all tables that read it."""
        rows = {table.name: table.rows for table in self.tables}
        return {key: min(rows[each.table] for each in read) for key, read in self.keys.items()}

    @property
    def feature_tables(self) -> tuple[Table, ...]:
        """The table of each feature, in feature order."""
        by_name = {table.name: table for table in self.tables}
        return tuple(by_name[feature.table] for feature in self.features)

    @property
    def weighted(self) -> bool:
        """Whether requests carry a weight for each id."""
        return any(table.weighted for table in self.tables)

    @property
    def weights(self) -> frozenset[str]:
        """The files of weights, which may be links to somewhere else; no other file of a bundle may."""
        return frozenset(rank.weights for rank in self.plan.ranks)

    @property
    def contract(self) -> str:
        """SHA-256, in hex, of all that a client can see: features, dims, weights and the output's dtype.

        Versions with the same contract can replace one another under a running client.
        """
        tables = zip(self.features, self.feature_tables, strict=True)
        features = [
            [feature.name, table.dim, table.weighted, *([] if feature.shared_key is None else [feature.shared_key])]
            for feature, table in tables
        ]
        return hashlib.sha256(msgspec.json.encode([features, self.output_dtype.value])).hexdigest()

    @property
    def layout(self) -> str:
        """SHA-256, in hex, of all that a program is compiled for: features, tables and plan."""
        seen = [self.features, self.tables, self.plan, self.output_dtype]
        return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).hexdigest()


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk whose manifest was read and found consistent."""

    path: Path
    manifest: Manifest


def versions(model: Path) -> list[int]:
    """The versions of the model at `<repository>/<name>`, oldest first; none where there is no model."""
    return sorted(int(entry.name) for entry in model.glob("[0-9]*") if entry.name.isdecimal())


def newest(model: Path) -> int:
    """The newest version of the model at `<repository>/<name>`.

    Raises:
        BundleError: there is none.
    """
    found = versions(model)
    if not found:
        raise BundleError(f"{model}: expected versions made by tbe-export, found none")
    return found[-1]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest` into `directory`, indented for people."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(text + b"\n")


def open_bundle(path: Path, trusted: "TrustedKeys | None" = None) -> Bundle:
    """Read the manifest of the bundle at `path` and check all that costs no read of the weights.

    Every file must be there with its size; the digests of all files but the weights must agree. The time
    taken does not depend on the size of the tables; `verify_digests` reads them too.

    Args:
        path: the bundle, <model>/<version>.
        trusted: one of these keys must have signed it as that version of that model; anybody may have made it where
            None.

    Raises:
        BundleError: naming the file or key that is missing, unknown, inconsistent or too new.
    """
    file = path / MANIFEST
    if trusted is None:
        try:
            text = read_file(file)
        except OSError as error:
            raise BundleError(f"{file}: cannot be read: {error.strerror}: is {path} a bundle?") from error
    else:
        text = trusted.read_version(file)
    manifest = parse_manifest(file, text)
    for name, digest in manifest.files.items():
        is_weights = name in manifest.weights
        check_size(path / name, digest, follow=is_weights)
        if not is_weights:
            check_digest(path / name, digest)
    return Bundle(path, manifest)


def hold(path: Path) -> int:
    """Mark the bundle at `path` as in use until the descriptor returned is closed, or the process ends.

    Raises:
        BundleError: there is no bundle.
    """
    try:
        with open_file(path / MANIFEST) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise BundleError(f"{path / MANIFEST}: cannot be read: {error.strerror}: is {path} a bundle?") from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def in_use(path: Path) -> Iterator[bool]:
    """Whether a process holds the bundle at `path`; where none does, none can begin to inside the block."""
    try:
        file = open_file(path / MANIFEST)
    except OSError as error:
        yield isinstance(error, PermissionError)  # no bundle: nobody can have opened it
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield True
        else:
            yield False


def verify_digests(bundle: Bundle) -> None:
    """Read every file of `bundle` and compare its SHA-256.

    Raises:
        BundleError: naming the first file that differs.
    """
    for name, digest in bundle.manifest.files.items():
        check_digest(bundle.path / name, digest, follow=name in bundle.manifest.weights)


def weights_changed_since(bundle: Bundle, moment: float) -> bool:
    """Whether anything was done to a file of weights after `moment`, Unix time; the kernel's word for it (ctime)."""
    return any((bundle.path / name).stat().st_ctime >= moment for name in bundle.manifest.weights)


class _Header(msgspec.Struct):
    format_version: int


def parse_manifest(path: Path, text: bytes) -> Manifest:
    """The manifest that says `text`, found consistent; `path` is where it is from.

    Raises:
        BundleError: naming the key that is missing, unknown, inconsistent or too new.
    """
    try:
        # The version first: a newer manifest may have keys that this code does not know.
        found = msgspec.json.decode(text, type=_Header).format_version
        if found not in _READABLE_VERSIONS:
            raise BundleError(
                f"{path}: format_version: expected one of {_READABLE_VERSIONS}, got {found}: "
                "serve it with the tbe-serving that exported it, or export it again"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except UNREADABLE as error:
        raise BundleError(f"{path}: {error}") from error
    _check_consistency(path, manifest)
    return manifest


def _check_consistency(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself: nothing after this indexes by a name it has not seen."""

    def expect(condition: bool, message: str) -> None:
        if not condition:
            raise BundleError(f"{path}: {message}")

    plan = manifest.plan
    tables = {table.name: table for table in manifest.tables}
    expect(len(tables) == len(manifest.tables), "tables: a name appears twice")
    names = [feature.name for feature in manifest.features]
    expect(len(names) > 0, "features: expected at least one")
    expect(len(set(names)) == len(names), "features: a name appears twice")
    side_by_side = [feature for features in manifest.keys.values() for feature in features]
    expect(side_by_side == list(manifest.features), "features: those of one key are not side by side")
    for feature in manifest.features:
        expect(feature.table in tables, f"feature {feature.name!r}: no table {feature.table!r}")
    for table in manifest.tables:
        expect(table.rows > 0 and table.dim > 0, f"table {table.name!r}: expected rows and dim > 0")
        expect(table.policy_error is None, f"table {table.name!r}: {table.policy_error}")
    for number, rank in enumerate(plan.ranks):
        expect(
            rank.device == DEVICE,
            f"rank {number}: was made for device {rank.device!r}, this is for {DEVICE!r}: export it again for that",
        )
    expect(plan.row_alignment == 1, f"row_alignment: expected 1 on cpu, got {plan.row_alignment}")
    expect(plan.sharding.keys() == tables.keys(), "plan: sharding does not name each table once")

    used = {MODEL, PROGRAM, *manifest.weights}
    expect(used == manifest.files.keys(), f"files: expected {sorted(used)}, got {sorted(manifest.files)}")
    for name in used:
        expect(name == Path(name).name and name not in (".", ".."), f"files: {name!r} leaves the bundle")

    for shard in plan.shards:
        expect(shard.table in tables, f"plan: a shard of no table, {shard.table!r}")
    shards_by_table = plan.shards_by_table
    for name, table in tables.items():
        shards = shards_by_table[name]
        wrong = tiling_error(plan.sharding[name], table.rows, table.dim, shards, len(plan.ranks))
        expect(wrong is None, f"table {name!r}: {wrong}")
        for shard in shards:
            size = manifest.files[plan.ranks[shard.rank].weights].size_bytes
            end = shard.offset_bytes + table.shard_bytes(shard)
            expect(
                shard.offset_bytes >= 0 and end <= size,
                f"table {name!r}: bytes [{shard.offset_bytes}, {end}) are outside a file of {size} bytes",
            )
