"""Load the dense part of a bundle from the fastest of its files that this process can load."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from serving.bundle.load import Bundle, read_checked
from serving.bundle.scores import ITEMS_PROGRAM, USER_PROGRAM, USER_SIDE_NAMES, DenseFile, DenseFormat
from serving.errors import BundleError
from serving.lookup.aot_inductor import load_aot_inductor, misfit
from serving.lookup.exported_program import load_exported_program
from serving.lookup.gemm import prefer_onednn
from serving.torchscript import one_line, torchscript

# Takes the embeddings [B, D], the dense inputs and the jagged inputs, in the manifest's order.
Forward = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class LoadedDensePart:
    """The dense part of a bundle in this process.

    Attributes:
        file: the file that it was loaded from.
        forward: runs it.
        failures: a line for each faster file that could not be loaded.
    """

    file: DenseFile
    forward: Forward
    failures: tuple[str, ...] = ()


def load_dense_part(bundle: Bundle, files: Sequence[DenseFile]) -> LoadedDensePart:
    """Load the first file of a dense part that this process can load.

    Raises:
        BundleError: no file can be loaded, or a file changed after the export.
    """
    failures: list[str] = []
    for file in files:
        path = bundle.path / file.name
        if (reason := misfit(file)) is not None:
            failures.append(f"{path}: {reason}")
            continue
        content = read_checked(path, bundle.manifest.files[file.name])
        try:
            forward = load_dense_file(file.format, content)
        except Exception as error:  # torch does not say of which types
            failures.append(f"{path}: torch {torch.__version__} cannot load it: {one_line(error)}")
            continue
        return LoadedDensePart(file, forward, tuple(failures))
    raise BundleError(f"{'; '.join(failures)}: export it again")


def load_dense_file(format_: DenseFormat, content: bytes) -> Forward:
    """Load the content of a file with a dense part. Native code must fit this process (`misfit`).

    Raises:
        Exception: torch cannot load it.
    """
    return _LOADERS[format_](content)


def load_user_side(bundle: Bundle) -> tuple[Forward, Forward]:
    """Load the programs for many items of one user.

    Raises:
        BundleError: a file changed after the export, or the programs were compiled for another user side.
        Exception: torch cannot load one.
    """
    user_content, items_content = (
        read_checked(bundle.path / name, bundle.manifest.files[name]) for name in (USER_PROGRAM, ITEMS_PROGRAM)
    )
    stored = {USER_SIDE_NAMES: b""}  # torch fills in what the archive has
    user = _load_torchscript(user_content, takes_weights=True, extra_files=stored)
    part = bundle.manifest.dense_part
    names = [] if part is None or part.user_side is None else [*part.user_side.names]
    if (compiled_for := msgspec.json.decode(stored[USER_SIDE_NAMES] or b"[]")) != names:
        raise BundleError(
            f"{bundle.path / USER_PROGRAM}: expected a program for the user side {names}, got one for "
            f"{compiled_for}: export it again"
        )
    return user, load_user_side_program(items_content)


def load_user_side_program(content: bytes) -> Forward:
    """Load the content of a file with a program for many items of one user.

    Raises:
        Exception: torch cannot load it.
    """
    return _load_torchscript(content, takes_weights=True)


def _load_torchscript(
    content: bytes, *, takes_weights: bool = False, extra_files: dict[str, bytes] | None = None
) -> Forward:
    with torchscript():
        program = torch.jit.load(io.BytesIO(content), "cpu", extra_files)  # type: ignore[no-untyped-call]
    prefer_onednn(program, takes_weights=takes_weights)
    forward: Forward = program.forward
    return forward


_LOADERS: dict[DenseFormat, Callable[[bytes], Forward]] = {
    DenseFormat.TORCHSCRIPT: _load_torchscript,
    DenseFormat.EXPORTED_PROGRAM: load_exported_program,
    DenseFormat.AOTINDUCTOR: load_aot_inductor,
}
