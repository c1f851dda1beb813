"""A router's plan in one process: what its answers are compared with before it is published."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from serving.bundle.manifest import FORMAT_VERSION, Manifest
from serving.bundle.weights import weights_paths


def assembled_manifest(router: Manifest) -> Manifest:
    """The same tables, features and plan, with a file of weights for every rank."""
    ranks = tuple(
        msgspec.structs.replace(rank, weights_file=f"weights.{number}.bin")
        for number, rank in enumerate(router.plan.ranks)
    )
    return msgspec.structs.replace(
        router,
        format_version=FORMAT_VERSION,
        plan=msgspec.structs.replace(router.plan, ranks=ranks),
        hosts=(),
        files={},
        parity=(),
    )


@contextmanager
def assembled(manifest: Manifest, weights: Mapping[int, Path], beside: Path) -> Iterator[Path]:
    """A folder with a link to the weights of every rank, under the names of `assembled_manifest`. It is removed.

    Args:
        manifest: as `assembled_manifest` returns it.
        weights: the file of each rank, by its number.
        beside: where the folder is made.
    """
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        for rank, link in weights_paths(Path(folder), manifest).items():
            link.symlink_to(weights[rank].absolute())
        yield Path(folder)


@contextmanager
def as_compiled_for(program: torch.jit.ScriptModule, manifest: Manifest) -> Iterator[torch.jit.ScriptModule]:
    """`program`, as one that was compiled for `manifest`, which differs from its own only in where weights are."""
    layout = program.layout
    program.layout = manifest.layout
    try:
        yield program
    finally:
        program.layout = layout
