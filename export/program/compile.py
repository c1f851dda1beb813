"""A manifest becomes TorchScript: the lookup, compiled for one set of tables, without their weights.

This is the one file that knows how a program is compiled and saved.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from serving.bundle.load import digest_file
from serving.bundle.manifest import MANIFEST, MODEL, PROGRAM, FileDigest, Manifest
from serving.lookup.build_program import build_program
from serving.lookup.sharded_program import ShardedProgram
from serving.model.config_file import model_py
from serving.torchscript import torchscript, torchscript_error

# The methods that routers call. TorchScript compiles `forward` and what it calls, and what is marked.
_METHODS_OF_ROUTERS = (ShardedProgram.split, ShardedProgram.lookup, ShardedProgram.merge)


def compile_program(manifest: Manifest) -> "torch.jit.ScriptModule | None":
    """The lookup of `manifest` as TorchScript. None: TorchScript does not work in this process."""
    if torchscript_error() is not None:
        return None
    for method in _METHODS_OF_ROUTERS:
        torch.jit.export(method)
    with torchscript():
        program: torch.jit.ScriptModule = torch.jit.script(build_program(manifest))
    return program


def save_program(program: "torch.jit.ScriptModule", path: Path) -> None:
    """Write `program` to `path`, without the weights that it may be using."""
    weights = program.weights_host
    program.weights_host = [torch.empty(0, dtype=torch.uint8) for _ in weights]
    try:
        path.write_bytes(program.save_to_buffer())  # torch takes no path that is not UTF-8
    finally:
        program.weights_host = weights


def write_program(
    directory: Path,
    manifest: Manifest,
    program: "torch.jit.ScriptModule | None",
    known_digests: Mapping[str, FileDigest],
) -> Manifest:
    """Write the program of a bundle, and what Triton starts it with.

    Args:
        directory: of the bundle. All its other files are there, but for its manifest.
        manifest: of the bundle.
        program: the compiled program. None: the bundle gets none, and readers build it from the manifest.
        known_digests: of files that need not be read again, by name.

    Returns:
        `manifest` with the digests of all files. It is not written.
    """
    (directory / MODEL).write_text(model_py())
    if program is not None:
        save_program(program, directory / PROGRAM)
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    files = {name: known_digests.get(name) or digest_file(directory / name) for name in names}
    return msgspec.structs.replace(manifest, files=files)
