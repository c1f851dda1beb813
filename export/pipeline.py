"""The steps of an export, in order: one bundle, or a router's bundle and its hosts'. Begin to read here.

Rows are stored in drafts. Each draft is finished and then published. A router's bundle names the bundles of its
hosts by their digests, so it is published last. Until then no server uses the bundles of the hosts.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec
from torch import nn

from export.config import Example, ExportConfig, Progress
from export.errors import PublishError
from export.hosts import host_bundles, open_parts, part_manifest, part_models, recorded_errors, tables_of_host
from export.parity.answers import Answers, answer_assembled, answer_probe, assembled_manifest
from export.parity.fresh_process import FreshProcess
from export.parity.limits import check_parity, coarse_notes, overflow_notes
from export.parity.verify_scores import expect_reloaded_scores
from export.prepare import Prepared, describe, prepare
from export.program.compile import compile_program, write_program
from export.publish.draft import Draft, draft, next_version
from export.rows.rank_files import RunningDigests, store_rows
from export.rows.table_error import TableError
from export.scores.auc import with_labelled_auc
from export.scores.dense_part import CompiledDensePart, compare_scores, save_scores
from export.trained.checkpoint import WeightSource
from export.trained.model_weights import open_weights
from export.trained.tables import collect_tables
from serving.bundle.load import Bundle, open_bundle
from serving.bundle.manifest import PROGRAM, FileDigest, Manifest, write_manifest
from serving.bundle.plan import FIRST_WEIGHTS
from serving.bundle.scores import DensePart
from serving.errors import BundleError, ConfigurationError
from serving.torchscript import torchscript_error


def export_model(
    module: nn.Module,
    repository: Path | str,
    name: str,
    config: ExportConfig | None = None,
    version: int | None = None,
    *,
    checkpoint: WeightSource = None,
    dense: nn.Module | None = None,
    example: Example | None = None,
    signing_key: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Quantize, plan, compile and check the embedding tables of `module`, then publish them as a bundle.

    After an error nothing is published, and no earlier version has changed.

    Args:
        module: has EmbeddingBagCollections or EmbeddingCollections, which may have position weights or managed
            collision modules. It must pass its ids on unchanged. Its dense part is left out of the bundle
            (`Manifest.left_out`), unless `config.scores` is set.
        repository: Triton's model repository, which is made if it is missing.
        name: the model's name in the repository.
        config: dtypes, id policies and limits by table. None: INT8 and `error` for all tables.
        version: the version's number. None: the next free one.
        checkpoint: the weights: a file, a folder, or a Checkpoint that reads tables in its own way. None: the weights
            of `module` itself.
        dense: with `config.scores`, replaces the module's dense part. Its forward takes the pooled embeddings by
            feature, `dict[str, Tensor]` [B, dim] each, and dense inputs [B, width] by name. TorchScript compiles it
            with its own weights. Its scores are not compared with those of `module`.
        example: the arguments of one call of the module. None: those of `config`.
        signing_key: a PEM file with an Ed25519 private key, which signs the bundle and a new model's settings. None:
            nothing is signed.
        progress: called as rows are stored.

    Returns:
        The bundle's path, `<repository>/<name>/<version>`.

    Raises:
        ModelError: the module's tables cannot be served; a module around them changes ids or weights; or the dense
            part cannot be traced or compiled.
        ConfigurationError: a setting or the signing key cannot be used.
        CheckpointError: the checkpoint lacks tables, or changed while it was read.
        QuantizeError: a row does not fit its dtype.
        PlanError: the tables do not fit the ranks.
        ParityError: a table's answers move further than its limit, or differ from the module's own.
        PublishError: the repository cannot take the bundle.
    """
    config = config or ExportConfig()
    if example is not None:
        config = replace(config, example=example)
    prepared = prepare(module, config, checkpoint, signing_key, progress, dense)
    return Export(prepared, Path(repository), name).publish(version)


@dataclass(frozen=True, slots=True)
class Stored:
    """The rows in the drafts of an export.

    Attributes:
        errors: how far the rows of each table moved.
        digests: the digests of the files.
    """

    errors: dict[str, TableError]
    digests: dict[Path, FileDigest]


@dataclass(frozen=True, slots=True)
class Export:
    """An export of one model: its bundle, and if hosts are models, a bundle for each host.

    Attributes:
        prepared: the tables and the manifest of the model's bundle.
        repository: Triton's model repository.
        name: the model.
    """

    prepared: Prepared
    repository: Path
    name: str

    def publish(self, version: int | None) -> Path:
        """Publish all bundles, under one version, from one read of the checkpoint.

        Args:
            version: the version's number. None: the next one that is free in all models.

        Returns:
            The path of the model's own bundle.
        """
        router = self.prepared.config.sharding.hosts_as_models
        models = part_models(self.prepared.manifest, self.name) if router else {}
        if models and version is None:
            version = max(next_version(self.repository / model) for model in (self.name, *models.values()))
        with ExitStack() as stack:
            fresh = stack.enter_context(FreshProcess())
            parts = {rank: stack.enter_context(self._part_draft(rank, version)) for rank in models}
            new = stack.enter_context(self._draft(self.name, version, self.prepared.manifest))
            stored = self._store(_own_files(new) | {rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()})
            finished = {rank: finish(part, self.prepared, stored, fresh) for rank, part in parts.items()}
            finish(new, self.prepared, stored, fresh, finished)
            for part in parts.values():
                part.publish()
            return new.publish()

    def publish_parts(self, hosts: Iterable[int], version: int) -> list[Path]:
        """Publish the bundles of some hosts. Only their rows of the checkpoint are read.

        Args:
            hosts: their numbers; at least one.
            version: the number that all bundles of the set will have.

        Returns:
            The paths of the bundles.

        Raises:
            ConfigurationError: the plan has no such host.
        """
        rank_of = self.prepared.manifest.plan.rank_of_host
        hosts = sorted({*hosts})
        if unknown := sorted({*hosts} - rank_of.keys()):
            raise ConfigurationError(f"only_hosts: expected hosts of the plan, 0 to {max(rank_of)}, got {unknown[0]}")
        with ExitStack() as stack:
            fresh = stack.enter_context(FreshProcess())
            parts = {rank_of[host]: stack.enter_context(self._part_draft(rank_of[host], version)) for host in hosts}
            stored = self._store({rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()})
            for part in parts.values():
                finish(part, self.prepared, stored, fresh)
            return [part.publish() for part in parts.values()]

    def complete(self, version: int) -> Path:
        """Publish the router's bundle for hosts whose bundles are published.

        Args:
            version: their number.

        Returns:
            The path of the router's bundle.

        Raises:
            PublishError: bundles of hosts are missing, damaged, or parts of another plan. All are named.
        """
        manifest = self.prepared.manifest
        parts = open_parts(self.repository, manifest, self.name, version)
        with FreshProcess() as fresh, self._draft(self.name, version, manifest) as router:
            router_rows = self._store(_own_files(router))
            stored = Stored(recorded_errors(manifest, parts, router_rows.errors), router_rows.digests)
            finish(router, self.prepared, stored, fresh, parts)
            return router.publish()

    def _draft(self, name: str, version: int | None, manifest: Manifest) -> AbstractContextManager[Draft]:
        serving = self.prepared.config.serving
        if serving is not None and manifest.part_of is not None:
            serving = serving.of_host()
        return draft(self.repository, name, version, manifest, serving, self.prepared.signing_key)

    def _part_draft(self, rank: int, version: int | None) -> AbstractContextManager[Draft]:
        """A draft of the bundle of a host."""
        router = self.prepared.manifest
        manifest = part_manifest(router, rank, self.name, self.prepared.config.sums_dtype)
        return self._draft(part_models(router, self.name)[rank], version, manifest)

    def _store(self, files: Mapping[int, Path]) -> Stored:
        """Write the rows of some ranks, each to its file. Rows of other ranks are not read."""
        prepared = self.prepared
        tables = prepared.trained.tables
        errors: dict[str, TableError] = {}
        stored_bytes, total_bytes = 0, sum(table.float_bytes for table in tables)
        with RunningDigests(files, prepared.manifest) as digests:
            for stored in store_rows(files, tables, prepared.manifest, prepared.weights):
                digests.written(stored.table, stored.stop)
                errors[stored.table] = stored.error
                stored_bytes += 4 * stored.elements
                prepared.progress(Progress(stored.table, stored_bytes, total_bytes))
            by_rank = digests.finish()
        prepared.weights.check_unchanged()  # from here on, nothing is read from it
        prepared.progress(Progress("parity", total_bytes, total_bytes))
        return Stored(errors, {files[rank]: digest for rank, digest in by_rank.items()})


def _own_files(new: Draft) -> dict[int, Path]:
    """A draft's own weights files, by rank."""
    ranks = enumerate(new.manifest.plan.ranks)
    return {number: new.path / rank.weights_file for number, rank in ranks if rank.weights_file is not None}


def finish(
    new: Draft,
    prepared: Prepared,
    stored: Stored,
    fresh: FreshProcess,
    parts: Mapping[int, Bundle] = MappingProxyType({}),
) -> Bundle:
    """Complete a draft whose rows are stored: write its programs, check its answers to a probe, write its manifest.

    Args:
        new: the draft of the model's bundle, or of a host's.
        prepared: the export.
        stored: the rows.
        fresh: a process that has not loaded the model.
        parts: for a router's bundle, the bundle of each rank on another host.

    Returns:
        The bundle, opened as for serving. It is not published.

    Raises:
        ParityError: a table moved further than its limit, or its answers differ from the module's own.
        PublishError: serving would refuse it.
    """
    part_of = new.manifest.part_of
    is_model = part_of is None
    scored = prepared.scored if is_model else None
    tables = {table.name: table.name for table in new.manifest.tables}
    if part_of is not None:
        tables = tables_of_host(prepared.manifest, part_of.host)
    errors = {name: stored.errors[table] for name, table in tables.items()}
    limits = {name: prepared.config.max_error_of(table) for name, table in tables.items()}
    if is_model:
        prepared.maps.write(new.path)
    with new.syncing():
        if scored is not None:
            save_scores(scored, new.path)
            expect_reloaded_scores(scored, new.path, fresh)
        program = compile_program(new.manifest)
        digests = {path.name: digest for path, digest in stored.digests.items() if path.parent == new.path}
        compared = manifest = write_program(new.path, new.manifest, program, digests)
        request = None if scored is None else scored.request
        if parts:
            answers = answer_assembled(new.path, manifest, program, parts, fresh, request)
            compared = assembled_manifest(manifest)
        else:
            write_manifest(new.path, manifest)  # a fresh process opens the draft as serving does
            answers = answer_probe(new.path, manifest, program, fresh, request)
        finished = msgspec.structs.replace(
            manifest,
            parity=check_parity(compared, errors, limits, answers, prepared.runnable if is_model else None),
            notes=_notes(prepared, {table: stored.errors[table] for table in tables.values()}, parts, program),
            hosts=() if new.version is None else host_bundles(manifest, new.name, new.version, parts),
            dense_part=None if scored is None else _measured(new, prepared, scored, answers),
        )
        write_manifest(new.path, finished)
    return _read_back(new.path)


def _notes(
    prepared: Prepared, errors: Mapping[str, TableError], parts: Mapping[int, Bundle], program: nn.Module | None
) -> tuple[str, ...]:
    """The notes of a bundle with some tables, and of the bundles of its hosts, without duplicates."""
    notes = [] if prepared.weights.summary is None else [prepared.weights.summary]
    notes += prepared.scored.notes if prepared.scored is not None else ()
    notes += [*overflow_notes(prepared.manifest, errors, prepared.config.sharding), *coarse_notes(errors)]
    if program is None:
        notes.append(f"has no {PROGRAM}: TorchScript does not work here: {torchscript_error()}")
    notes += [note for part in parts.values() for note in part.manifest.notes]
    return tuple(dict.fromkeys(notes))


def _measured(new: Draft, prepared: Prepared, scored: CompiledDensePart, answers: Answers) -> DensePart:
    """The dense part for the manifest: how far its scores are from the trained model's, and their AUC."""
    part = compare_scores(scored, answers.requested)
    return with_labelled_auc(new.path, scored, part, prepared.labelled) if prepared.labelled else part


def _read_back(directory: Path) -> Bundle:
    """Open a draft as for serving, so that no bundle is published that serving would refuse."""
    try:
        return open_bundle(directory)
    except BundleError as error:
        raise PublishError(f"the draft of this version could not be served: {error}") from error


def plan_model(
    module: nn.Module,
    config: ExportConfig,
    *,
    checkpoint: WeightSource = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """The manifest that `export_model` would write. Rows are read only to choose a dtype within `max_error`.

    Raises:
        ModelError, ConfigurationError, CheckpointError, QuantizeError, PlanError: as `export_model`.
    """
    trained = collect_tables(module, trace=config.example is None)
    prefix = config.checkpoint_prefix
    if checkpoint is None:
        return describe(trained.tables, config, lambda: open_weights(module, trained, None, prefix), progress)
    weights = open_weights(module, trained, checkpoint, prefix)
    for table in trained.tables:  # the checkpoint must have the tables, even if the plan needs no row
        weights.check(table)
    manifest = describe(trained.tables, config, lambda: weights, progress)
    weights.check_unchanged()
    return manifest
