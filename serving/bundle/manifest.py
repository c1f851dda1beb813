"""The bundle on disk: what export writes and serving loads.

A bundle is one Triton model version::

    model.py             from serving.backend import TritonPythonModel
    manifest.json        the types below, as JSON
    program.pt           TorchScript, without weights
    scores.pt            the dense part, if there is one: TorchScript with its weights
    weights.<rank>.bin   the rows of that rank's shards, exactly as FBGEMM's TBE kernel reads them
    ids.bin              which rows raw ids read, if they are remapped: serving/bundle/id_maps.py
    manifest.sig         the publisher's signature, if there is one: serving/bundle/signature.py

`serving.bundle.rows` has the format of a row.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from serving.bundle.digests import FileDigest
from serving.bundle.hosts import HostBundle, IdDtype, Part
from serving.bundle.id_maps import IDS
from serving.bundle.plan import Plan
from serving.bundle.scores import DensePart
from serving.bundle.tables import Feature, IdPolicy, OutputDtype, Table
from serving.files.strict import Strict

FORMAT_VERSION = 4
# Of bundles on several hosts: a router's, and those of its hosts.
HOSTS_FORMAT_VERSION = 5
# Of bundles with the id policy `modulo`, with position weights, or with INT32 ids that are not on hosts; whether on
# several hosts or not.
IDS_FORMAT_VERSION = 6
# Of bundles with a dense part, maps of ids, or tables that are not pooled; whether on several hosts or not.
NEWEST_FORMAT_VERSION = 7
MANIFEST = "manifest.json"
PROGRAM = "program.pt"
MODEL = "model.py"
# As a pattern of file names: the weights of all ranks.
WEIGHTS_FILES = "weights.*.bin"
# The device whose kernels read the rows. Other devices need other packing.
DEVICE = "cpu"
# Bytes. Shards start at multiples of two cache lines, as tables of FBGEMM's own allocator do.
SHARD_ALIGNMENT = 128


class Agreement(Strict, frozen=True):
    """How far two versions a and b of one table's numbers are from one another.

    Attributes:
        largest: the largest |a − b|.
        mean: the mean of |a − b|.
        cosine: of all numbers of a and all of b.
        worst_row: the row with the largest |a − b|.
    """

    largest: float
    mean: float
    cosine: float
    worst_row: int


class Parity(Strict, frozen=True, omit_defaults=True):
    """How far one table's numbers moved at each step of the export.

    `quantized` compares rows. All others compare answers to a probe, and their rows are samples.

    Attributes:
        table: name of the table.
        limit: no element of the table's rows may move by more than this.
        quantized: the trained float rows, with the stored ones.
        sharded: numpy's pooling of the stored rows, with the program before it is compiled.
        scripted: the program before it is compiled, with TorchScript.
        reloaded: TorchScript, with the published files in another process.
        trained: the trained module as TorchRec runs it, with `reloaded`. None: it could not be run.
    """

    table: str
    limit: float
    quantized: Agreement
    sharded: Agreement
    scripted: Agreement
    reloaded: Agreement
    trained: Agreement | None = None


class Manifest(Strict, frozen=True, omit_defaults=True):
    """What a bundle holds.

    Attributes:
        features: in the default order of an answer. Features of one key are side by side. The default order of a
            request is that of their keys.
        parity: of each table.
        exported_at: seconds of Unix time.
        versions: of the libraries that exported the bundle, by name.
        files: every file of the bundle but the manifest and its signature, by name.
        left_out: parts of the trained module that are not in the bundle, in words.
        notes: what people who serve the bundle should know, in words.
        hosts: of a router, the bundles that answer for the ranks without a file of weights, by number of the host.
        part_of: of a host's bundle, what it is a part of.
        id_dtype: the dtype of `values` in a request.
        dense_part: what turns pooled embeddings into scores. None: embeddings are all that is served.
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
    hosts: tuple[HostBundle, ...] = ()
    part_of: Part | None = None
    id_dtype: IdDtype = IdDtype.INT64
    dense_part: DensePart | None = None

    @property
    def keys(self) -> dict[str, tuple[Feature, ...]]:
        """The features of each key of a request, in feature order."""
        by_key: dict[str, tuple[Feature, ...]] = {}
        for feature in self.features:
            by_key[feature.key] = (*by_key.get(feature.key, ()), feature)
        return by_key

    @property
    def weighted_keys(self) -> tuple[str, ...]:
        """The keys whose ids carry weights: a weighted table reads them, and not by position."""
        sends = self.sends_weights
        return tuple(key for key, read in self.keys.items() if any(sends[each.name] for each in read))

    @property
    def sends_weights(self) -> dict[str, bool]:
        """Whether a request has a weight for each id of a feature, by the feature's name."""
        weighted = {table.name for table in self.tables if table.weighted}
        return {each.name: each.table in weighted and each.position_weights is None for each in self.features}

    @property
    def longest_bags(self) -> dict[str, int]:
        """The most ids in a bag of each key that is read by position."""
        longest: dict[str, int] = {}
        for feature in self.features:
            if feature.position_weights:
                most = len(feature.position_weights)
                longest[feature.key] = min(most, longest.get(feature.key, most))
        return longest

    @property
    def rows_of_keys(self) -> dict[str, int]:
        """The number of ids that are valid for each key: in [0, rows) of every table that reads it.

        It is 2⁶³ where all these tables have maps: any int64 is an id of theirs.
        """
        rows = {table.name: table.rows if table.id_map is None else 2**63 for table in self.tables}
        return {key: min(rows[each.table] for each in read) for key, read in self.keys.items()}

    @property
    def feature_tables(self) -> tuple[Table, ...]:
        """The table of each feature, in feature order."""
        by_name = {table.name: table for table in self.tables}
        return tuple(by_name[feature.table] for feature in self.features)

    @property
    def weighted(self) -> bool:
        """Whether a request carries a weight for each id."""
        return any(self.sends_weights.values())

    @property
    def weights_files(self) -> frozenset[str]:
        """The names of the ranks' files. These may be symbolic links; no other file of a bundle may."""
        return frozenset(rank.weights_file for rank in self.plan.ranks if rank.weights_file is not None)

    @property
    def mapped_files(self) -> frozenset[str]:
        """The names of the files that are mapped and not read: those of the ranks, and the maps of ids."""
        return self.weights_files | {IDS for table in self.tables if table.id_map is not None}

    @property
    def contract(self) -> str:
        """SHA-256, in hex, of all that a client can see.

        This is features, dims, whether they are pooled and ids carry weights, the dtypes of ids and output, and the
        names and shapes of dense inputs and scores. A version can replace another with the same contract while
        clients run.
        """
        tables = zip(self.features, self.feature_tables, strict=True)
        sends = self.sends_weights
        features: list[list[object]] = [
            [
                feature.name,
                table.dim,
                sends[feature.name],
                *([feature.shared_key, "sequence"] if table.is_sequence else []),
                *([] if table.is_sequence or feature.shared_key is None else [feature.shared_key]),
            ]
            for feature, table in tables
        ]
        ids = [] if self.id_dtype is IdDtype.INT64 else [self.id_dtype.value]
        scores = [] if self.dense_part is None else [self.dense_part.contract]
        return hashlib.sha256(msgspec.json.encode([features, self.output_dtype.value, *ids, *scores])).hexdigest()

    @property
    def layout(self) -> str:
        """SHA-256, in hex, of all that a program is compiled for: features, tables, plan and output dtype."""
        seen = [self.features, self.tables, self.plan, self.output_dtype]
        return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).hexdigest()


def format_version_of(
    tables: Iterable[Table], features: Iterable[Feature], id_dtype: IdDtype, *, on_hosts: bool
) -> int:
    """The lowest format that can say what a bundle without a dense part holds. Older readers can go on.

    Args:
        tables: of the bundle.
        features: of the bundle.
        id_dtype: of its requests.
        on_hosts: whether it is a router's, or a host's.
    """
    is_narrow = id_dtype is IdDtype.INT32 and not on_hosts
    by_position = any(feature.position_weights is not None for feature in features)
    tables = tuple(tables)
    if any(table.id_map is not None or table.is_sequence for table in tables):
        return NEWEST_FORMAT_VERSION
    if is_narrow or by_position or any(table.id_policy is IdPolicy.MODULO for table in tables):
        return IDS_FORMAT_VERSION
    return HOSTS_FORMAT_VERSION if on_hosts else FORMAT_VERSION


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest` into `directory` as indented JSON."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(text + b"\n")
