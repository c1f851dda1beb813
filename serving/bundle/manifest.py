"""The bundle on disk, which export writes and serving loads, and its manifest.

A bundle is one version of a Triton model::

    model.py             from serving.backend import TritonPythonModel
    manifest.json        the types below, as JSON
    program.pt           the lookup as TorchScript, without weights, unless the export could not use TorchScript
    scores.pt            the dense part, if the bundle has scores, with its weights: TorchScript
    scores.pt2           the same as an exported program
    scores.user.pt       what depends on the user alone, for many items of one user; TorchScript
    scores.items.pt      the rest of the dense part for these items
    weights.<rank>.bin   the rows of that rank's shards, exactly as FBGEMM's TBE kernel reads them
    ids.bin              id maps, if raw ids are remapped to rows: serving/bundle/id_maps.py
    manifest.sig         the publisher's signature, if the bundle is signed: serving/bundle/signature.py

`serving.bundle.formats` has the formats of rows.
"""

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from serving.bundle.id_maps import ID_MAPS_FILE
from serving.bundle.plan import LINEAGE, HostBundle, IdDtype, Part, Plan
from serving.bundle.scores import DenseFormat, DensePart
from serving.bundle.tables import Feature, IdPolicy, OutputDtype, Table
from serving.bundle.tensor_names import EMBEDDINGS
from serving.files import Strict
from serving.notebook_table import notebook_table

# The number of this format. `Manifest.requires` has what a bundle needs of its reader beyond the format.
FORMAT_VERSION = 10
MANIFEST = "manifest.json"
PROGRAM = "program.pt"
MODEL = "model.py"
# Pattern of the names of weights files.
WEIGHTS_FILES = "weights.*.bin"
# The device whose kernels read the rows. Other devices need rows in another layout.
DEVICE = "cpu"
# The devices whose bundles can be read, and the row alignment of each in bytes.
ROW_ALIGNMENTS = {DEVICE: 1}
# Shards start at multiples of this, in bytes: two cache lines, as in FBGEMM's own allocator.
SHARD_ALIGNMENT = 128


def aligned(offset: int, alignment: int = SHARD_ALIGNMENT) -> int:
    """The next multiple of `alignment`, at which a shard may start."""
    return -(-offset // alignment) * alignment


class Capability(StrEnum):
    """A capability that a bundle may require of its reader. A reader refuses unknown ones by name."""

    AOT_INDUCTOR = "aot_inductor"
    COMPACTED = "compacted"
    DENSE_FILES = "dense_files"
    DENSE_PART = "dense_part"
    HOSTS = "hosts"
    ID_MAPS = "id_maps"
    INPUT_HASH_SIZE = "input_hash_size"
    INT32_IDS = "int32_ids"
    MODULO = "modulo"
    NO_PROGRAM = "no_program"
    POSITION_WEIGHTS = "position_weights"
    SEQUENCES = "sequences"
    USER_SIDE = "user_side"


class FileDigest(Strict, frozen=True):
    """Size and SHA-256 of a file of a bundle. `sha256` is in hex."""

    size_bytes: int
    sha256: str


class Agreement(Strict, frozen=True):
    """The difference between two versions a and b of one table's numbers.

    Attributes:
        largest: the largest |a − b|.
        mean: the mean of |a − b|.
        cosine: cosine similarity of all numbers of a and all numbers of b.
        worst_row: the row with the largest |a − b|.
    """

    largest: float
    mean: float
    cosine: float
    worst_row: int


class Parity(Strict, frozen=True, omit_defaults=True):
    """How far one table's numbers moved at each step of the export.

    `quantized` compares rows. The other steps compare answers to a probe. Pooled answers are divided by the number of
    ids in their bags, or by the sum of |weight| if that is larger than 1, so that all differences are per element of
    a row. In these steps, `worst_row` is a sample.

    Attributes:
        table: the name of the table.
        limit: the largest allowed change of an element of the table's rows.
        quantized: the trained float rows against the stored rows.
        sharded: numpy's pooling of the stored rows against the program before it is compiled.
        reloaded: the program, as TorchScript if possible, against the published files in another process.
        scripted: the program before it is compiled against its TorchScript. None: the bundle has no `program.pt`.
        trained: the trained module, run by TorchRec, against the published files. None: it could not be run.
    """

    table: str
    limit: float
    quantized: Agreement
    sharded: Agreement
    reloaded: Agreement
    scripted: Agreement | None = None
    trained: Agreement | None = None


class Compacted(Strict, frozen=True):
    """The deltas that are in the rows of a version.

    Attributes:
        lineage: their lineage, which the version continues: 32 hex digits.
        sequence: the number of the newest of these deltas; 0 for no delta. The rows also have all earlier deltas.
    """

    lineage: Annotated[str, msgspec.Meta(pattern=f"^{LINEAGE.pattern}$")]
    sequence: Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class Manifest(Strict, frozen=True, omit_defaults=True):
    """The content of manifest.json: what the bundle holds.

    Attributes:
        features: the features in the default order of an answer. Features of one key are adjacent. The default order
            of a request is the order of their keys.
        parity: the parity of each table.
        exported_at: Unix time in seconds.
        versions: versions of the libraries that exported the bundle, by name.
        files: every file of the bundle except the manifest and its signature, by name.
        left_out: parts of the trained module that are not in the bundle, in words.
        notes: notes for operators, in words.
        hosts: in a router's manifest, the bundle of each rank without a weights file, by number of the host.
        part_of: in the manifest of a host, the plan that it is a part of.
        id_dtype: the dtype of `values` in a request.
        dense_part: the program that turns pooled embeddings into scores. None: only embeddings are served.
        compacted: the deltas that are in its rows. None: it has no deltas, and starts a lineage.
        checkpoint: the fingerprint of the files that its weights were read from: SHA-256, in hex. Bundles that were
            exported from the same save have the same fingerprint. None: the weights were not read from a file.
    """

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
    compacted: Compacted | None = None
    checkpoint: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None

    def _repr_html_(self) -> str:
        """Its tables, as notebooks show them."""
        keys = {table.name: list[str]() for table in self.tables}
        for feature in self.features:
            keys[feature.table].append(feature.key)
        outputs = [EMBEDDINGS] + [output.name for output in (self.dense_part.outputs if self.dense_part else ())]
        size = sum(table.rows * table.row_bytes for table in self.tables)
        return notebook_table(
            f"{len(self.tables)} tables, {size:,} bytes of rows, {len(self.plan.ranks)} ranks; "
            f"answers: {', '.join(outputs)}",
            ("table", "rows", "dim", "dtype", "bytes", "pooling", "features"),
            (
                (
                    table.name,
                    table.rows,
                    table.dim,
                    table.dtype.value.lower(),
                    table.rows * table.row_bytes,
                    table.pooling.value.lower(),
                    ", ".join(keys[table.name]),
                )
                for table in self.tables
            ),
        )

    @property
    def requires(self) -> tuple[Capability, ...]:
        """The capabilities that a reader must have to serve the bundle, in the order of `Capability`."""
        maps = [table.id_map for table in self.tables if table.id_map is not None]
        dense_files = () if self.dense_part is None else self.dense_part.files
        needed = {
            Capability.AOT_INDUCTOR: any(file.format is DenseFormat.AOTINDUCTOR for file in dense_files),
            Capability.COMPACTED: self.compacted is not None,
            Capability.DENSE_FILES: bool(dense_files),
            Capability.DENSE_PART: self.dense_part is not None,
            Capability.HOSTS: bool(self.hosts) or self.part_of is not None,
            Capability.ID_MAPS: bool(maps),
            Capability.INPUT_HASH_SIZE: any(id_map.valid_ids is not None for id_map in maps),
            Capability.INT32_IDS: self.id_dtype is IdDtype.INT32,
            Capability.MODULO: any(table.id_policy is IdPolicy.MODULO for table in self.tables),
            # A plan has no files yet.
            Capability.NO_PROGRAM: bool(self.files) and PROGRAM not in self.files,
            Capability.POSITION_WEIGHTS: any(feature.position_weights is not None for feature in self.features),
            Capability.SEQUENCES: any(table.is_sequence for table in self.tables),
            Capability.USER_SIDE: self.dense_part is not None and self.dense_part.user_side is not None,
        }
        return tuple(capability for capability in Capability if needed[capability])

    @property
    def sequence(self) -> int:
        """The number of the newest delta in its rows, or 0."""
        return 0 if self.compacted is None else self.compacted.sequence

    @property
    def keys(self) -> dict[str, tuple[Feature, ...]]:
        """The features of each key of a request, in feature order."""
        by_key: dict[str, tuple[Feature, ...]] = {}
        for feature in self.features:
            by_key[feature.key] = (*by_key.get(feature.key, ()), feature)
        return by_key

    @property
    def key_of_feature(self) -> dict[str, str]:
        """The key that each feature reads, by the feature's name."""
        return {feature.name: feature.key for feature in self.features}

    @property
    def pooled_columns(self) -> dict[str, tuple[int, int]]:
        """The columns of each pooled feature in the embeddings of a request for all features, [first, last)."""
        columns: dict[str, tuple[int, int]] = {}
        first = 0
        for feature, table in zip(self.features, self.feature_tables, strict=True):
            if not table.is_sequence:
                columns[feature.name] = first, first + table.dim
                first += table.dim
        return columns

    @property
    def weighted_keys(self) -> tuple[str, ...]:
        """The keys whose ids carry per-id weights: a weighted table without position weights reads them."""
        sends = self.sends_weights
        return tuple(key for key, features in self.keys.items() if any(sends[feature.name] for feature in features))

    @property
    def sends_weights(self) -> dict[str, bool]:
        """Whether a request has per-id weights for a feature, by the feature's name."""
        weighted = {table.name for table in self.tables if table.weighted}
        return {
            feature.name: feature.table in weighted and feature.position_weights is None for feature in self.features
        }

    @property
    def longest_bags(self) -> dict[str, int]:
        """The maximum number of ids in a bag, for each key that is read with position weights."""
        longest: dict[str, int] = {}
        for feature in self.features:
            if feature.position_weights:
                most = len(feature.position_weights)
                longest[feature.key] = min(most, longest.get(feature.key, most))
        return longest

    @property
    def rows_of_keys(self) -> dict[str, int]:
        """The number of valid ids of each key: the smallest one of the tables that read it.

        It is `ANY_INT64` if any int64 is a valid id of all these tables.
        """
        rows = {table.name: table.valid_ids for table in self.tables}
        return {key: min(rows[feature.table] for feature in features) for key, features in self.keys.items()}

    @property
    def feature_tables(self) -> tuple[Table, ...]:
        """The table of each feature, in feature order."""
        by_name = {table.name: table for table in self.tables}
        return tuple(by_name[feature.table] for feature in self.features)

    @property
    def weighted(self) -> bool:
        """Whether a request carries per-id weights."""
        return any(self.sends_weights.values())

    @property
    def weights_files(self) -> frozenset[str]:
        """The names of the ranks' weights files, the only files of a bundle that may be symbolic links."""
        return frozenset(rank.weights_file for rank in self.plan.ranks if rank.weights_file is not None)

    @property
    def mapped_files(self) -> frozenset[str]:
        """The names of the files that are mapped instead of read: the weights files and the file of id maps."""
        return self.weights_files | {ID_MAPS_FILE for table in self.tables if table.id_map is not None}

    @property
    def schema_digest(self) -> str:
        """SHA-256, in hex, of all that a client can see.

        That is the features with their dims, whether they are pooled and have per-id weights, the dtypes of ids and
        outputs, and the names, shapes and dtypes of dense inputs and scores. A version can replace another one with
        the same schema while clients run.
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
        scores = [] if self.dense_part is None else [self.dense_part.schema]
        return hashlib.sha256(msgspec.json.encode([features, self.output_dtype.value, *ids, *scores])).hexdigest()

    @property
    def placement_digest(self) -> str:
        """SHA-256, in hex, of all that a program is compiled for: features, tables, plan and output dtype."""
        compiled_for = [self.features, self.tables, self.plan, self.output_dtype]
        return hashlib.sha256(msgspec.json.encode(compiled_for, order="sorted")).hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest` into `directory` as indented JSON, with its format and what it requires in front."""
    header = {"format_version": FORMAT_VERSION, "requires": [capability.value for capability in manifest.requires]}
    document = {**header, **msgspec.to_builtins(manifest)}
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    (directory / MANIFEST).write_bytes(text + b"\n")
