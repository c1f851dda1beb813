"""Verify a published bundle: its files, answers, rows and scores. A router is verified with its hosts' bundles."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from export.config import Example
from export.errors import ModelError
from export.ids.id_maps import build_maps
from export.parity.answers import Answers, answer_assembled, answer_probe
from export.parity.fresh_process import FreshProcess
from export.parity.limits import compare_trained
from export.parity.verify_scores import scored_of, verify_scores
from export.prepare import with_position_weights
from export.rows.table_error import Tally
from export.scores.auc import with_labelled_auc
from export.scores.dense_part import CompiledDensePart
from export.scores.labelled_requests import LabelledRequest, read_labelled
from export.scores.probe_inputs import probe_request
from export.trained.checkpoint import Checkpoint, WeightSource, blocks
from export.trained.loaded_tables import load_tables
from export.trained.model_weights import load_weights, open_weights
from export.trained.tables import Trained, TrainedTable
from serving.bundle.load import Bundle, open_bundle, open_host, verify_digests, weights_path
from serving.bundle.manifest import MANIFEST, Agreement, Manifest, Parity
from serving.bundle.plan import Shard, ShardingType, path_of
from serving.bundle.scores import DensePart
from serving.bundle.signature import TrustedKeys
from serving.bundle.tables import Table
from serving.errors import BundleError, ConfigurationError
from serving.files import as_text
from serving.lookup.program import load_fbgemm, load_torchscript
from serving.reference import read_rows
from serving.requests.id_maps import IdMaps, known_of_keys
from serving.requests.types import Tensors
from serving.torchscript import torchscript_error


def recorded_parity(bundle: Bundle) -> dict[str, Parity]:
    """The parity that the export of `bundle` recorded, by table.

    Raises:
        BundleError: a table has no parity, or two. Engines do not read it, so such a bundle can still be served.
    """
    tables = {table.name for table in bundle.manifest.tables}
    recorded = Counter(parity.table for parity in bundle.manifest.parity)
    for name in sorted({*tables, *recorded}):
        if name not in recorded:
            wrong = f"no table {name!r}"
        elif name not in tables:
            wrong = f"another table {name!r}"
        elif recorded[name] > 1:
            wrong = f"table {name!r} twice"
        else:
            continue
        raise BundleError(
            f"{bundle.path / MANIFEST}: parity: expected each table once, got {wrong}: "
            "it is not what an export wrote; export it again"
        )
    return {parity.table: parity for parity in bundle.manifest.parity}


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification.

    Attributes:
        bundle: the bundle.
        parity: of each table.
        failures: a line for each failure; empty for a good bundle.
        measured: whether `Parity.quantized` was measured now. Otherwise the export recorded it.
        absent: bundles of a router's hosts that are not in its repository. If there are any, no answers were
            compared, and `parity` and `dense_part` are those that the export recorded.
        dense_part: with its parity, which was measured now if possible; None: the bundle has no scores.
        source: the weights that it was compared with, in a line; None: no checkpoint.
        is_run: whether the trained model itself was run.
    """

    bundle: Bundle
    parity: tuple[Parity, ...]
    failures: tuple[str, ...]
    measured: bool
    absent: tuple[Path, ...] = ()
    dense_part: DensePart | None = None
    source: str | None = None
    is_run: bool = False


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """The model that was exported, to compare a bundle with: its rows, its answers and its scores.

    Attributes:
        trained: its tables.
        checkpoint: its weights; None: the module has them.
        prefix: of its keys in the checkpoint; None: the only one that fits.
        example: the call with which it was exported; None: it was exported without one.
        labelled: a file of requests with labels, on which the AUC is measured; None: it is not measured.
        trained_memory_bytes: as `ExportConfig.trained_memory_bytes`.
    """

    trained: Trained
    checkpoint: WeightSource = None
    prefix: str | None = None
    example: Example | None = None
    labelled: Path | None = None
    trained_memory_bytes: int | None = None

    def requests(self, manifest: Manifest) -> list[LabelledRequest]:
        """Read the requests with labels.

        Raises:
            ConfigurationError: the AUC of this bundle cannot be measured, or the file cannot be read.
        """
        if self.labelled is None:
            return []
        if manifest.dense_part is None or manifest.dense_part.is_own or manifest.hosts:
            raise ConfigurationError(
                "labelled (--labelled): expected a model (--model), and a bundle with scores of the model's layers "
                "that is not a router's"
            )
        return read_labelled(self.labelled)

    def open(self, bundle: Bundle) -> "_OpenedModel":
        """Open the weights, and load them into the model if they fit; errors as `verify`."""
        part = bundle.manifest.dense_part
        is_whole = part is not None and not part.is_own
        trained = self.trained
        weights = open_weights(trained.module, trained, self.checkpoint, self.prefix, is_whole=is_whole)
        is_loaded = True
        if self.checkpoint is not None:
            if is_whole:
                load_weights(trained, weights)
            is_loaded = load_tables(trained, weights, self.trained_memory_bytes, lambda _done, _total: None)
        scored = None
        if is_whole and part is not None:
            scored = scored_of(bundle, part, trained, weights, not is_loaded, self.example)
        return _OpenedModel(trained, weights, is_loaded, scored)


@dataclass(frozen=True, slots=True)
class _OpenedModel:
    """A `ComparedModel` with its weights.

    Attributes:
        trained: its tables.
        weights: their rows.
        is_loaded: whether the model's tables have their weights, so that it can be run.
        scored: its dense part, compiled as the bundle's was. None: the bundle has no layers of the model.
    """

    trained: Trained
    weights: Checkpoint
    is_loaded: bool
    scored: CompiledDensePart | None


def verify(
    path: Path,
    compared: ComparedModel | None = None,
    *,
    trusted: TrustedKeys | None = None,
    parts: Mapping[int, Bundle] | None = None,
) -> Verification:
    """Read every byte of a bundle, compare copies of tables, and answer a probe at each step, as in `Answers`.

    Scores are computed from that answer, for requests merged and alone. A router's hosts are verified with it: their
    bundles are read, and the probe is answered with all of them in one process. If a host's bundle is not in the
    router's repository, only the router's files are read, and no answers are compared.

    Args:
        path: the bundle, <model>/<version>.
        compared: the model that was exported. Every stored row is compared with its float row, and scores with its
            scores. None: neither is compared.
        trusted: one of these keys must have signed the bundles. None: no signature is needed.
        parts: the bundles of a router's hosts by rank; None: those in its repository.

    Raises:
        BundleError: none of the keys signed it, a file differs from its digest, the bundle cannot be opened, or its
            manifest lacks the parity of a table; a host's bundle is not the one that the router's names.
        ModelError: the tables or scores of the bundle differ from those of the model; with a model, the bundle is
            a host's, or a host's bundle is missing.
        ConfigurationError: there are labels, but no scores; or the file of labels cannot be used.
        CheckpointError: weights are missing, or changed while they were read.
        ParityError: a fresh process cannot answer from it.
    """
    bundle = open_bundle(path, trusted)
    manifest = bundle.manifest
    requests = [] if compared is None else compared.requests(manifest)
    if manifest.part_of is not None and compared is not None:
        raise ModelError(
            f"{path}: holds shards of {manifest.part_of.model!r}: verify the bundle of {manifest.part_of.model!r} to "
            "compare float rows"
        )
    with FreshProcess() as fresh:
        verify_digests(bundle)
        load_fbgemm()
        program, failure = load_torchscript(bundle)
        if failure is not None and torchscript_error() is None:  # a server would build the program from the manifest
            raise BundleError(f"{failure}: export it again")
        if absent := _absent_hosts(bundle) if parts is None else ():
            if compared is not None:
                raise ModelError(f"{absent[0]}: is missing: comparing float rows needs the bundles of all hosts")
            return Verification(bundle, manifest.parity, (), False, absent, manifest.dense_part)
        model = None if compared is None else compared.open(bundle)
        scored = None if model is None else model.scored
        request = scored.request if scored is not None else _request_for(bundle)
        if manifest.hosts:
            hosts = _host_bundles(bundle, trusted) if parts is None else parts
            answers = answer_assembled(path, manifest, program, hosts, fresh, request)
        else:
            answers = answer_probe(path, manifest, program, fresh, request)
    verification = _compare(bundle, answers, model)
    if model is not None:
        model.weights.check_unchanged()
    part = manifest.dense_part
    if part is None or request is None:
        return verification
    part, failures = verify_scores(bundle, part, request, answers.requested, scored)
    if requests and scored is not None:
        part = with_labelled_auc(path, scored, part, requests)
    return replace(verification, dense_part=part, failures=(*verification.failures, *failures))


def _request_for(bundle: Bundle) -> Tensors | None:
    """Make a request for scores, or None if the bundle has no scores."""
    manifest = bundle.manifest
    if manifest.dense_part is None:
        return None
    maps = IdMaps.of(bundle.path, manifest)
    return probe_request(manifest, manifest.dense_part, known_of_keys({} if maps is None else maps.known, manifest))


def _host_bundles(router: Bundle, trusted: TrustedKeys | None) -> dict[int, Bundle]:
    """Open the bundles of all hosts, and read every byte of them. Returns them by rank."""
    parts = {}
    for host in router.manifest.hosts:
        part = open_host(router, host, trusted)
        verify_digests(part)
        parts[router.manifest.plan.rank_of_host[host.host]] = part
    return parts


def _absent_hosts(router: Bundle) -> tuple[Path, ...]:
    """The bundles of a router's hosts that are not in its repository."""
    paths = (path_of(router.path, host) for host in router.manifest.hosts)
    return tuple(path for path in paths if not path.is_dir())


def _compare(
    bundle: Bundle,
    answers: Answers,
    model: _OpenedModel | None,
) -> Verification:
    """Compare the answers to a probe at each step, and the rows of a bundle with those of its model.

    Args:
        bundle: its files match their digests.
        answers: to the probe.
        model: the model that was exported. Every stored row is compared with its float row, and answers with its own.

    Raises:
        BundleError: the manifest lacks the parity of a table.
        ModelError: the tables of the bundle differ from the model's.
        CheckpointError: rows are missing.
    """
    manifest = bundle.manifest
    recorded = recorded_parity(bundle)
    quantized = {name: parity.quantized for name, parity in recorded.items()}
    if model is not None:
        quantized = _compare_rows(bundle, model.trained.tables, model.weights)
    limits = {name: parity.limit for name, parity in recorded.items()}
    failures = [*answers.refusals(manifest), *_differing_copies(bundle.path, manifest)]
    failures += [
        f"table {name!r}: row {agreement.worst_row} differs by {agreement.largest:.3g} from the weights given, "
        f"expected at most {limits[name]:.3g}: {_IS_IT}"
        for name, agreement in quantized.items()
        if not agreement.largest <= limits[name]
    ]
    trained = {name: parity.trained for name, parity in recorded.items()}
    if model is not None:
        failures += _differing_settings(bundle, model)
        trained = dict.fromkeys(trained)
        if model.is_loaded and not failures:
            errors = {name: agreement.largest for name, agreement in quantized.items()}
            agreements, failures = compare_trained(model.trained, manifest, answers, errors)
            trained |= agreements
    parity = tuple(
        msgspec.structs.replace(
            answers.parity(manifest, table, quantized[table.name], limits[table.name]), trained=trained[table.name]
        )
        for table in manifest.tables
    )
    return Verification(
        bundle,
        parity,
        tuple(failures),
        model is not None,
        dense_part=manifest.dense_part,
        source=None if model is None else model.weights.summary,
        is_run=model is not None and model.is_loaded,
    )


_IS_IT = "is this the model that was exported?"


def _differing_settings(bundle: Bundle, model: _OpenedModel) -> Iterator[str]:
    """A line for each feature whose position weights, and each table whose map of ids, differ from the model's."""
    manifest, tables, weights = bundle.manifest, model.trained.tables, model.weights
    expected = with_position_weights(manifest, tables, weights)
    for feature, expected_feature in zip(manifest.features, expected.features, strict=True):
        if feature != expected_feature:
            yield f"feature {feature.name!r}: its position weights differ from the model's: {_IS_IT}"
    for name in build_maps(tables, weights).differing(bundle.path, manifest):
        yield f"table {name!r}: its map of ids differs from the model's: {_IS_IT}"


def _compare_rows(bundle: Bundle, trained: tuple[TrainedTable, ...], weights: Checkpoint) -> dict[str, Agreement]:
    """Compare the stored rows of each table with the float rows. Returns the agreement by table."""
    manifest = bundle.manifest
    shapes = {table.name: (table.rows, table.dim) for table in trained}
    expected = {table.name: (table.rows, table.dim) for table in manifest.tables}
    if shapes != expected:
        raise ModelError(f"{bundle.path}: expected a model with tables {expected}, got {shapes}")
    by_name = {table.name: table for table in trained}
    pieces = manifest.plan.pieces_by_table
    agreements = {}
    for stored in manifest.tables:
        tally = Tally()
        table = by_name[stored.name]
        weights.check(table)
        for start, rows in blocks(table, weights):
            ids = np.arange(start, start + len(rows))
            numbers, _ = read_rows(bundle.path, manifest, pieces[stored.name], stored, ids)
            tally.add(start, rows.to(torch.float64).numpy(), numbers)
        agreements[stored.name] = tally.agreement
    return agreements


_BLOCK_BYTES = 16 << 20


def _differing_copies(directory: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each copy of a data-parallel table that differs from the copy on the lowest rank."""
    plan = manifest.plan
    for table in manifest.tables:
        if plan.sharding[table.name] is not ShardingType.DATA_PARALLEL:
            continue
        first, *copies = sorted(plan.shards_by_table[table.name], key=lambda shard: shard.rank)
        rows = _rows(directory, manifest, table, first)
        for copy in copies:
            row = _first_difference(rows, _rows(directory, manifest, table, copy))
            if row is not None:
                yield (
                    f"table {table.name!r}: row {row} of its copy on rank {copy.rank} differs from that on rank "
                    f"{first.rank}, expected equal copies: export it again"
                )


def _rows(directory: Path, manifest: Manifest, table: Table, shard: Shard) -> npt.NDArray[np.uint8]:
    """The bytes of a whole copy, uint8 [rows, row bytes], mapped."""
    file = weights_path(directory, manifest, shard.rank)
    return np.memmap(file, np.uint8, mode="r", offset=shard.offset_bytes, shape=(table.rows, table.row_bytes))


def _first_difference(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> int | None:
    step = max(1, _BLOCK_BYTES // one.shape[1])
    for start in range(0, len(one), step):
        differs = (one[start : start + step] != other[start : start + step]).any(axis=1)
        if differs.any():
            return start + int(differs.argmax())
    return None


def as_json(verification: Verification) -> str:
    """A verification as JSON: {bundle, ok, failures, quantized_measured, tables: [parity], dense_part}."""
    result = {
        "bundle": as_text(verification.bundle.path),
        "ok": not verification.failures,
        "failures": verification.failures,
        "quantized_measured": verification.measured,
        "tables": verification.parity,
        "dense_part": verification.dense_part,
    }
    return msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
