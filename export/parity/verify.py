"""Verify a published bundle, a router's with those of its hosts: its files, its answers, its rows and its scores."""

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
    """What the export of `bundle` recorded, by table.

    Raises:
        BundleError: it is not that of each table once. No engine needs it: the bundle can be served all the same.
    """
    tables = {table.name for table in bundle.manifest.tables}
    recorded = Counter(each.table for each in bundle.manifest.parity)
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
    return {each.table: each for each in bundle.manifest.parity}


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Attributes:
        bundle: the bundle.
        parity: of each table.
        failures: a line for each. There are none in a good bundle.
        measured: whether `Parity.quantized` was measured now. Else it is what the export recorded.
        absent: bundles of a router's hosts that are not in its repository. Where there are some, no answers were
            compared, and `parity` and `dense_part` are what the export recorded.
        dense_part: with its parity, measured now as far as it can be; None: the bundle has no scores.
        taken: what of a checkpoint it was compared with, in a line. None: no checkpoint.
        is_run: whether the trained model itself was run.
    """

    bundle: Bundle
    parity: tuple[Parity, ...]
    failures: tuple[str, ...]
    measured: bool
    absent: tuple[Path, ...] = ()
    dense_part: DensePart | None = None
    taken: str | None = None
    is_run: bool = False


def verify(
    path: Path,
    trained: Trained | None = None,
    checkpoint: WeightSource = None,
    trusted: TrustedKeys | None = None,
    example: Example | None = None,
    parts: Mapping[int, Bundle] | None = None,
    *,
    prefix: str | None = None,
    labelled: Path | None = None,
    trained_memory_bytes: int | None = None,
) -> Verification:
    """Read every byte of a bundle, compare its copies, and answer a probe: by numpy, uncompiled, compiled, reloaded.

    Scores are made of that answer, for requests together and alone. Of a router, the bundles of its hosts are read,
    too, and the probe is answered with all of them in one process. Where one is not in the router's repository, the
    router's own files are read, and no answers are compared.

    Args:
        path: the bundle, <model>/<version>.
        trained: what it was exported from. Every stored row is compared with its float one, and scores with scores.
        checkpoint: has the weights of `trained`; None: the module itself has them.
        trusted: one of these keys must have signed the bundles. None: anybody may have made them.
        example: of a call of `trained`, with which it was exported; None: without one.
        parts: of a router, the bundles of its hosts by rank; None: those in its repository.
        prefix: of the keys of `trained` in the checkpoint; None: the only one that fits.
        labelled: a file of requests for scores with labels, on which their AUC is measured; None measures none.
        trained_memory_bytes: as `ExportConfig.trained_memory_bytes`.

    Raises:
        BundleError: none of the keys signed it, a file differs from its digest, the bundle cannot be opened, or its
            manifest lacks the parity of a table; a host's bundle is not the one that the router's names.
        ModelError: the bundle holds other tables or scores than `trained`; with `trained`, the bundle is a host's, or
            a host's bundle is not there.
        ConfigurationError: there are labels, and no scores or model; or the file cannot be used.
        CheckpointError: the weights are not all there, or changed while they were read.
        ParityError: a fresh process cannot answer from it.
    """
    bundle = open_bundle(path, trusted)
    manifest = bundle.manifest
    requests = [] if labelled is None else _labelled(labelled, manifest, trained)
    if manifest.part_of is not None and trained is not None:
        raise ModelError(
            f"{path}: holds shards of {manifest.part_of.model!r}: give the bundle of that to compare float rows"
        )
    with FreshProcess() as fresh:
        verify_digests(bundle)
        load_fbgemm()
        program, failure = load_torchscript(bundle)
        if failure is not None and torchscript_error() is None:  # a server would build the program from the manifest
            raise BundleError(f"{failure}: export it again")
        if absent := _absent_hosts(bundle) if parts is None else ():
            if trained is not None:
                raise ModelError(f"{absent[0]}: expected the bundles of all hosts there, to compare float rows")
            return Verification(bundle, manifest.parity, (), False, absent, manifest.dense_part)
        model = None
        if trained is not None:
            model = _open_model(bundle, trained, checkpoint, prefix, trained_memory_bytes, example)
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


@dataclass(frozen=True, slots=True)
class _Model:
    """The model that a bundle is compared with.

    Attributes:
        trained: its tables.
        weights: has their rows.
        is_loaded: whether the model has its weights itself, so that it can be run.
        scored: its dense part, made as the bundle's was. None: the bundle has none of the model's layers.
    """

    trained: Trained
    weights: Checkpoint
    is_loaded: bool
    scored: CompiledDensePart | None


def _open_model(
    bundle: Bundle,
    trained: Trained,
    checkpoint: WeightSource,
    prefix: str | None,
    trained_memory_bytes: int | None,
    example: Example | None,
) -> _Model:
    """A model with its weights, or with a checkpoint that has them; arguments and errors as `verify`."""
    part = bundle.manifest.dense_part
    is_whole = part is not None and not part.is_own
    weights = open_weights(trained.module, trained, checkpoint, prefix, is_whole=is_whole)
    is_loaded = True
    if checkpoint is not None:
        if is_whole:
            load_weights(trained, weights)
        is_loaded = load_tables(trained, weights, trained_memory_bytes, lambda _done, _total: None)
    scored = None
    if is_whole and part is not None:
        scored = scored_of(bundle, part, trained, weights, not is_loaded, example)
    return _Model(trained, weights, is_loaded, scored)


def _labelled(file: Path, manifest: Manifest, trained: Trained | None) -> list[LabelledRequest]:
    """The requests of `--labelled`.

    Raises:
        ConfigurationError: nothing can be measured on them, or the file cannot be read.
    """
    if trained is None or manifest.dense_part is None or manifest.dense_part.is_own or manifest.hosts:
        raise ConfigurationError(
            "labelled (--labelled): expected a model (--model), and a bundle with scores of its layers that is no "
            "router's"
        )
    return read_labelled(file)


def _request_for(bundle: Bundle) -> Tensors | None:
    """A request for scores; None: the bundle has none."""
    manifest = bundle.manifest
    if manifest.dense_part is None:
        return None
    maps = IdMaps.of(bundle.path, manifest)
    return probe_request(manifest, manifest.dense_part, known_of_keys({} if maps is None else maps.known, manifest))


def _host_bundles(router: Bundle, trusted: TrustedKeys | None) -> dict[int, Bundle]:
    """The bundles of all hosts, by rank. Every byte of them was read."""
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
    model: _Model | None,
) -> Verification:
    """What `answers` to a probe, and the rows of a bundle, say of it.

    Args:
        bundle: its digests agree.
        answers: by numpy, uncompiled, compiled, and reloaded.
        model: what it was exported from. Every stored row is compared with its float one, and answers with its own.

    Raises:
        BundleError: the manifest lacks the parity of a table.
        ModelError: the bundle holds other tables than `trained`.
        CheckpointError: the rows are not all there.
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
        f"expected at most {limits[name]:.3g}: is this what it was exported from?"
        for name, agreement in quantized.items()
        if not agreement.largest <= limits[name]
    ]
    own = {name: parity.trained for name, parity in recorded.items()}
    if model is not None:
        failures += _differing_settings(bundle, model)
        own = dict.fromkeys(own)
        if model.is_loaded and not failures:
            moved = {name: agreement.largest for name, agreement in quantized.items()}
            agreements, failures = compare_trained(model.trained, manifest, answers, moved)
            own |= agreements
    parity = tuple(
        msgspec.structs.replace(
            answers.parity(manifest, table, quantized[table.name], limits[table.name]), trained=own[table.name]
        )
        for table in manifest.tables
    )
    return Verification(
        bundle,
        parity,
        tuple(failures),
        model is not None,
        dense_part=manifest.dense_part,
        taken=None if model is None else model.weights.summary,
        is_run=model is not None and model.is_loaded,
    )


def _differing_settings(bundle: Bundle, model: _Model) -> Iterator[str]:
    """A line for each feature and map of ids that is not the model's."""
    manifest, tables, weights = bundle.manifest, model.trained.tables, model.weights
    expected = with_position_weights(manifest, tables, weights)
    for feature, given in zip(manifest.features, expected.features, strict=True):
        if feature != given:
            yield (
                f"feature {feature.name!r}: its position weights are not those given: is this what it was exported "
                "from?"
            )
    for name in build_maps(tables, weights).differing(bundle.path, manifest):
        yield f"table {name!r}: its map of ids is not the one given: is this what it was exported from?"


def _compare_rows(bundle: Bundle, trained: tuple[TrainedTable, ...], weights: Checkpoint) -> dict[str, Agreement]:
    """How far the stored rows of each table are from the float ones, by table."""
    manifest = bundle.manifest
    found = {table.name: (table.rows, table.dim) for table in trained}
    expected = {table.name: (table.rows, table.dim) for table in manifest.tables}
    if found != expected:
        raise ModelError(f"{bundle.path}: expected a model with tables {expected}, got {found}")
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
    """A line for each copy that is not, byte for byte, the one on the lowest rank.

    Args:
        directory: of the bundle.
        manifest: of the bundle.
    """
    plan = manifest.plan
    for table in manifest.tables:
        if plan.sharding[table.name] is not ShardingType.DATA_PARALLEL:
            continue
        first, *others = sorted(plan.shards_by_table[table.name], key=lambda shard: shard.rank)
        rows = _rows(directory, manifest, table, first)
        for other in others:
            row = _first_difference(rows, _rows(directory, manifest, table, other))
            if row is not None:
                yield (
                    f"table {table.name!r}: row {row} of its copy on rank {other.rank} differs from that on rank "
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
    """A verification as JSON: {bundle, ok, failures, quantized_measured, tables: [parity of each], dense_part}."""
    seen = {
        "bundle": as_text(verification.bundle.path),
        "ok": not verification.failures,
        "failures": verification.failures,
        "quantized_measured": verification.measured,
        "tables": verification.parity,
        "dense_part": verification.dense_part,
    }
    return msgspec.json.format(msgspec.json.encode(seen), indent=1).decode()
