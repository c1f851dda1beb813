"""A router's plan in one process: what its answers are compared with before it is published."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from export.parity.answers import Answers, answer_probe
from export.parity.fresh_process import FreshProcess
from export.steps import write_program
from serving.bundle.digests import FileDigest
from serving.bundle.id_maps import IDS
from serving.bundle.manifest import Manifest, format_version_of
from serving.bundle.weights import weights_paths


def assembled_manifest(router: Manifest) -> Manifest:
    """The same tables, features and plan, with a file of weights for every rank."""
    ranks = tuple(
        msgspec.structs.replace(rank, weights_file=f"weights.{number}.bin")
        for number, rank in enumerate(router.plan.ranks)
    )
    return msgspec.structs.replace(
        router,
        format_version=format_version_of(router.tables, router.features, router.id_dtype, on_hosts=False),
        plan=msgspec.structs.replace(router.plan, ranks=ranks),
        hosts=(),
        dense_part=None,
        files={},
        parity=(),
    )


def answer_assembled(
    directory: Path,
    router: Manifest,
    program: torch.jit.ScriptModule,
    weights: Mapping[int, Path],
    digests: Mapping[int, FileDigest],
    fresh: FreshProcess,
) -> Answers:
    """Answer a probe with all ranks in one process.

    Args:
        directory: of the router's bundle, which has the maps of ids.
        router: the router's manifest.
        program: the router's, compiled.
        weights: the file of each rank, by its number.
        digests: of these files.
        fresh: another process.

    Raises:
        ParityError: a fresh process cannot answer.
    """
    whole = assembled_manifest(router)
    with tempfile.TemporaryDirectory() as folder, _as_compiled_for(program, whole):
        links = weights_paths(Path(folder), whole)
        for rank, link in links.items():
            link.symlink_to(weights[rank].absolute())
        known = {link.name: digests[rank] for rank, link in links.items()}
        if IDS in whole.mapped_files:
            (Path(folder) / IDS).symlink_to((directory / IDS).absolute())
            known[IDS] = router.files[IDS]
        return answer_probe(Path(folder), write_program(Path(folder), whole, program, known), program, fresh)


@contextmanager
def _as_compiled_for(program: torch.jit.ScriptModule, manifest: Manifest) -> Iterator[torch.jit.ScriptModule]:
    """`program`, as one that was compiled for `manifest`, which differs from its own only in where weights are."""
    layout = program.layout
    program.layout = manifest.layout
    try:
        yield program
    finally:
        program.layout = layout
