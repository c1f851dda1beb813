"""Export a router's bundle and one for each host: all in one go, or by several machines at once.

A router's bundle names the bundles of its hosts by their digests, so it is published last. Until then the bundles of
the hosts are versions that nobody asks for.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import msgspec
import torch

from export.hosts.assembled import answer_assembled, assembled_manifest
from export.hosts.part import part_manifest, part_models, table_of_part
from export.hosts.published import open_parts, recorded_errors
from export.parity.answers import Answers, answer_probe
from export.parity.fresh_process import FreshProcess
from export.parity.overflow import overflow_notes
from export.prepare import Prepared
from export.program.compile import compile_program
from export.progress import Progress, float_bytes
from export.publish.draft import Draft, draft, next_version
from export.rows.table_error import TableError
from export.steps import limits_of, parity_of, read_back, scores_of, store, write_program
from serving.bundle.digests import FileDigest
from serving.bundle.hosts import FIRST_WEIGHTS, HostBundle
from serving.bundle.manifest import Manifest, write_manifest
from serving.bundle.opening import Bundle
from serving.bundle.weights import weights_path
from serving.errors import ConfigurationError


class HostsExport:
    """An export of bundles for several hosts.

    Args:
        prepared: the tables, and the router's manifest.
        repository: Triton's model repository.
        name: the router's model.
    """

    def __init__(self, prepared: Prepared, repository: Path, name: str) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._manifest = prepared.manifest
        self._repository = repository
        self._name = name
        self._fresh = FreshProcess()

    def publish(self, version: int | None) -> Path:
        """Publish all bundles, under one version, from one read of the checkpoint.

        Args:
            version: the version's number; the next that is free in all models where None.

        Returns:
            The path of the router's bundle.
        """
        if version is None:
            models = [self._name, *part_models(self._manifest, self._name).values()]
            version = max(next_version(self._repository / model) for model in models)
        with ExitStack() as stack:
            stack.enter_context(self._fresh)
            parts = {rank: stack.enter_context(self._draft_of(rank, version)) for rank in self._elsewhere}
            router = stack.enter_context(self._draft(self._name, version, self._manifest))
            files = {rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()}
            errors, digests = self._store({0: weights_path(router.path, self._manifest, 0), **files})
            finished = {rank: self._finish(rank, part, errors, digests[rank]) for rank, part in parts.items()}
            self._finish_router(router, version, errors, finished, digests[0])
            for part in parts.values():
                part.publish()
            return router.publish()

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
        rank_of = self._manifest.plan.rank_of_host
        hosts = sorted({*hosts})
        if unknown := sorted({*hosts} - rank_of.keys()):
            raise ConfigurationError(f"only_hosts: expected hosts of the plan, 0 to {max(rank_of)}, got {unknown[0]}")
        with ExitStack() as stack:
            stack.enter_context(self._fresh)
            parts = {rank_of[each]: stack.enter_context(self._draft_of(rank_of[each], version)) for each in hosts}
            errors, digests = self._store({rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()})
            for rank, part in parts.items():
                self._finish(rank, part, errors, digests[rank])
            return [part.publish() for part in parts.values()]

    def complete(self, version: int) -> Path:
        """Publish the router's bundle for hosts whose bundles are published.

        Args:
            version: their number.

        Returns:
            The path of the router's bundle.

        Raises:
            PublishError: a host's bundle is missing, damaged, or part of another plan; all are named.
        """
        parts = open_parts(self._repository, self._manifest, self._name, version)
        with self._fresh, self._draft(self._name, version, self._manifest) as router:
            errors, digests = self._store({0: weights_path(router.path, self._manifest, 0)})
            for name, error in recorded_errors(self._manifest, parts).items():
                if name in errors:
                    errors[name].join(error)
                else:
                    errors[name] = error
            self._finish_router(router, version, errors, parts, digests[0])
            return router.publish()

    @property
    def _elsewhere(self) -> list[int]:
        """The ranks that are on other hosts."""
        return list(part_models(self._manifest, self._name))

    def _draft(self, name: str, version: int, manifest: Manifest) -> AbstractContextManager[Draft]:
        serving = self._config.serving
        if serving is not None and manifest.part_of is not None:
            serving = serving.of_host()
        return draft(self._repository, name, version, manifest, serving, self._prepared.signing_key)

    def _draft_of(self, rank: int, version: int) -> AbstractContextManager[Draft]:
        """A draft of the bundle of a host."""
        manifest = part_manifest(self._manifest, rank, self._name, self._config.sums_dtype)
        return self._draft(part_models(self._manifest, self._name)[rank], version, manifest)

    def _store(self, files: Mapping[int, Path]) -> tuple[dict[str, TableError], dict[int, FileDigest]]:
        return store(
            files, self._prepared.trained.tables, self._manifest, self._prepared.weights, self._prepared.progress
        )

    def _finish(self, rank: int, part: Draft, errors: Mapping[str, TableError], stored: FileDigest) -> Bundle:
        """Complete the draft of a host's bundle, whose rows are `stored`; the bundle, as serving would open it."""
        tables = table_of_part(self._manifest, rank)
        limits = limits_of(self._manifest, self._config)
        program = compile_program(part.manifest)
        manifest = write_program(part.path, part.manifest, program, {FIRST_WEIGHTS: stored})
        parity = parity_of(
            manifest,
            {name: errors[table] for name, table in tables.items()},
            {name: limits[table] for name, table in tables.items()},
            answer_probe(part.path, manifest, program, self._fresh),
            None,
        )
        held = {name: error for name, error in errors.items() if name in tables.values()}
        notes = tuple(overflow_notes(self._manifest, held, self._config.sharding))
        write_manifest(part.path, msgspec.structs.replace(manifest, parity=parity, notes=notes))
        return read_back(part.path)

    def _finish_router(
        self,
        router: Draft,
        version: int,
        errors: Mapping[str, TableError],
        parts: Mapping[int, Bundle],
        stored: FileDigest,
    ) -> None:
        """Complete the draft of the router's bundle: the rows of its own rank and all hosts' bundles are there.

        Args:
            router: the draft.
            version: of all bundles.
            errors: of every table.
            parts: the bundle of each rank that is on another host.
            stored: the digest of the rows of its own rank.
        """
        self._prepared.maps.write(router.path)
        self._prepared.progress(Progress("parity", total := float_bytes(*self._prepared.trained.tables), total))
        program = compile_program(self._manifest)
        scored = self._prepared.scored
        own = weights_path(router.path, self._manifest, 0).name
        manifest = write_program(router.path, self._manifest, program, {own: stored}, scored)
        answers = self._answers_in_one_process(router, manifest, program, parts)
        whole = assembled_manifest(manifest)
        parity = parity_of(whole, errors, limits_of(whole, self._config), answers, self._prepared.runnable)
        notes = dict.fromkeys(overflow_notes(self._manifest, errors, self._config.sharding))
        notes |= dict.fromkeys(note for part in parts.values() for note in part.manifest.notes)
        models = part_models(self._manifest, self._name)
        hosts = tuple(
            HostBundle(
                host=self._manifest.plan.ranks[rank].host, model=models[rank], version=version, manifest=part.digest
            )
            for rank, part in parts.items()
        )
        finished = msgspec.structs.replace(
            manifest, parity=parity, notes=tuple(notes), hosts=hosts, dense_part=scores_of(scored, answers)
        )
        write_manifest(router.path, finished)
        read_back(router.path)

    def _answers_in_one_process(
        self, router: Draft, manifest: Manifest, program: torch.jit.ScriptModule, parts: Mapping[int, Bundle]
    ) -> Answers:
        """The answers to a probe, with all bundles in one process; arguments as `_finish_router`.

        Args:
            manifest: the router's, with the digests of its files.
            program: the router's.
        """
        own = manifest.plan.ranks[0].weights_file
        assert own is not None  # noqa: S101  the router's rank has one
        files = {0: router.path / own} | {rank: part.path / FIRST_WEIGHTS for rank, part in parts.items()}
        digests = {0: manifest.files[own]}
        digests |= {rank: part.manifest.files[FIRST_WEIGHTS] for rank, part in parts.items()}
        return answer_assembled(router.path, manifest, program, files, digests, self._fresh)
