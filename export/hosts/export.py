"""Export a router's bundle and one for each host: all in one go, or by several machines at once.

A router's bundle names the bundles of its hosts by their digests, so it is published last. Until then the bundles of
the hosts are versions that nobody asks for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from export.config import ExportConfig
from export.hosts.assembled import as_compiled_for, assembled, assembled_manifest
from export.hosts.part import part_manifest, part_models, table_of_part
from export.hosts.published import open_parts, recorded_errors
from export.parity.answers import answer_probe
from export.parity.overflow import overflow_notes
from export.program.compile import compile_program
from export.progress import Progress, float_bytes
from export.publish.draft import Draft, draft, next_version
from export.rows.table_error import TableError
from export.steps import limits_of, parity_of, read_back, store, write_program
from export.trained.checkpoint import Checkpoint
from export.trained.tables import Trained, TrainedTable
from serving.bundle.hosts import FIRST_WEIGHTS, HostBundle
from serving.bundle.manifest import Manifest, Parity, write_manifest
from serving.bundle.opening import Bundle
from serving.bundle.weights import weights_path, weights_paths
from serving.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsExport:
    """An export of bundles for several hosts.

    Attributes:
        trained: the tables.
        weights: the checkpoint with their rows.
        manifest: the router's, as far as it is known before rows are stored; without hosts.
        config: what to export.
        repository: Triton's model repository.
        name: the router's model.
        signing_key: signs each bundle, and the settings of new models.
        progress: called as rows are stored.
    """

    trained: Sequence[TrainedTable]
    weights: Checkpoint
    manifest: Manifest
    config: ExportConfig
    repository: Path
    name: str
    signing_key: Ed25519PrivateKey | None
    progress: Callable[[Progress], None]

    def publish(self, version: int | None, runnable: Trained | None) -> Path:
        """Publish all bundles, under one version, from one read of the checkpoint.

        Args:
            version: the version's number; the next that is free in all models where None.
            runnable: the trained module; None where it cannot be run.

        Returns:
            The path of the router's bundle.
        """
        if version is None:
            models = [self.name, *part_models(self.manifest, self.name).values()]
            version = max(next_version(self.repository / model) for model in models)
        with ExitStack() as stack:
            parts = {rank: stack.enter_context(self._draft_of(rank, version)) for rank in self._elsewhere}
            router = stack.enter_context(self._draft(self.name, version, self.manifest))
            files = {rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()}
            errors = self._store({0: weights_path(router.path, self.manifest, 0), **files})
            finished = {rank: self._finish(rank, part, errors) for rank, part in parts.items()}
            self._finish_router(router, version, errors, finished, runnable)
            for part in parts.values():
                part.publish()
            return router.publish()

    def publish_parts(self, hosts: Iterable[int], version: int) -> list[Path]:
        """Publish the bundles of some hosts. Only their rows of the checkpoint are read.

        Args:
            hosts: their numbers.
            version: the number that all bundles of the set will have.

        Returns:
            The paths of the bundles.

        Raises:
            ConfigurationError: the plan has no such host.
        """
        rank_of = {self.manifest.plan.ranks[rank].host: rank for rank in self._elsewhere}
        if unknown := sorted({*hosts} - rank_of.keys()):
            raise ConfigurationError(f"only_hosts: expected hosts of the plan, 0 to {max(rank_of)}, got {unknown[0]}")
        with ExitStack() as stack:
            parts = {rank_of[each]: stack.enter_context(self._draft_of(rank_of[each], version)) for each in hosts}
            errors = self._store({rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()})
            for rank, part in parts.items():
                self._finish(rank, part, errors)
            return [part.publish() for part in parts.values()]

    def complete(self, version: int, runnable: Trained | None) -> Path:
        """Publish the router's bundle for hosts whose bundles are published.

        Args:
            version: their number.
            runnable: the trained module; None where it cannot be run.

        Returns:
            The path of the router's bundle.

        Raises:
            PublishError: a host's bundle is missing, damaged, or part of another plan; all are named.
        """
        parts = open_parts(self.repository, self.manifest, self.name, version)
        with self._draft(self.name, version, self.manifest) as router:
            errors = self._store({0: weights_path(router.path, self.manifest, 0)})
            errors |= recorded_errors(self.manifest, parts)
            self._finish_router(router, version, errors, parts, runnable)
            return router.publish()

    @property
    def _elsewhere(self) -> list[int]:
        """The ranks that are on other hosts."""
        return list(part_models(self.manifest, self.name))

    def _draft(self, name: str, version: int, manifest: Manifest) -> AbstractContextManager[Draft]:
        return draft(self.repository, name, version, manifest, self.config.serving, self.signing_key)

    def _draft_of(self, rank: int, version: int) -> AbstractContextManager[Draft]:
        """A draft of the bundle of a host."""
        manifest = part_manifest(self.manifest, rank, self.name, self.config.sums_dtype)
        return self._draft(part_models(self.manifest, self.name)[rank], version, manifest)

    def _store(self, files: Mapping[int, Path]) -> dict[str, TableError]:
        return store(files, self.trained, self.manifest, self.weights, self.progress)

    def _finish(self, rank: int, part: Draft, errors: Mapping[str, TableError]) -> Bundle:
        """Complete the draft of a host's bundle, whose rows are stored; the bundle, as serving would open it."""
        tables = table_of_part(self.manifest, rank)
        limits = limits_of(self.manifest, self.config)
        program = compile_program(part.manifest)
        manifest = write_program(part.path, part.manifest, program)
        parity = parity_of(
            manifest,
            {name: errors[table] for name, table in tables.items()},
            {name: limits[table] for name, table in tables.items()},
            answer_probe(part.path, manifest, program),
            None,
        )
        held = {name: error for name, error in errors.items() if name in tables.values()}
        notes = tuple(overflow_notes(self.manifest, held, self.config.sharding))
        write_manifest(part.path, msgspec.structs.replace(manifest, parity=parity, notes=notes))
        return read_back(part.path)

    def _finish_router(
        self,
        router: Draft,
        version: int,
        errors: Mapping[str, TableError],
        parts: Mapping[int, Bundle],
        runnable: Trained | None,
    ) -> None:
        """Complete the draft of the router's bundle: the rows of its own rank and all hosts' bundles are there.

        Args:
            router: the draft.
            version: of all bundles.
            errors: of every table.
            parts: the bundle of each rank that is on another host.
            runnable: the trained module; None where it cannot be run.
        """
        self.progress(Progress("parity", total := float_bytes(*self.trained), total))
        program = compile_program(self.manifest)
        manifest = write_program(router.path, self.manifest, program)
        parity = self._parity_in_one_process(router, manifest, program, errors, parts, runnable)
        notes = dict.fromkeys(overflow_notes(self.manifest, errors, self.config.sharding))
        notes |= dict.fromkeys(note for part in parts.values() for note in part.manifest.notes)
        models = part_models(self.manifest, self.name)
        hosts = tuple(
            HostBundle(
                host=self.manifest.plan.ranks[rank].host, model=models[rank], version=version, manifest=part.digest
            )
            for rank, part in parts.items()
        )
        write_manifest(router.path, msgspec.structs.replace(manifest, parity=parity, notes=tuple(notes), hosts=hosts))
        read_back(router.path)

    def _parity_in_one_process(
        self,
        router: Draft,
        manifest: Manifest,
        program: torch.jit.ScriptModule,
        errors: Mapping[str, TableError],
        parts: Mapping[int, Bundle],
        runnable: Trained | None,
    ) -> tuple[Parity, ...]:
        """The parity of every table, with all bundles in one process; arguments as `_finish_router`.

        Args:
            manifest: the router's, with the digests of its files.
            program: the router's.
        """
        own = manifest.plan.ranks[0].weights_file
        assert own is not None  # noqa: S101  the router's rank has one
        files = {0: router.path / own} | {rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()}
        digests = {0: manifest.files[own]}
        digests |= {rank: part.manifest.files[FIRST_WEIGHTS] for rank, part in parts.items()}
        whole = assembled_manifest(manifest)
        known = {path.name: digests[rank] for rank, path in weights_paths(Path(), whole).items()}
        with assembled(whole, files, router.root) as folder, as_compiled_for(program, whole):
            answers = answer_probe(folder, write_program(folder, whole, program, known), program)
        return parity_of(whole, errors, limits_of(whole, self.config), answers, runnable)
