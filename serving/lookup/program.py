"""Load the lookup program of a bundle, and the libraries of FBGEMM that it calls.

`program.pt` is the program as TorchScript. Without it, or if torch cannot load it, the same program is built from the
manifest. Its answers are the same, bit for bit, but small requests take longer (docs/decisions/0005-lookup.md).
"""

import importlib.util
import inspect
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from serving.bundle.load import Bundle, read_checked
from serving.bundle.manifest import PROGRAM
from serving.errors import BundleError
from serving.lookup.build_program import build_program
from serving.lookup.instruction_set import warn_of_slow_kernels
from serving.pins import check_pins, mismatch
from serving.torchscript import one_line, torchscript

# TBE's lookups, and the operators that split and join jagged tensors. They load the libraries that they need.
_LIBRARIES = ("fbgemm_gpu_tbe_inference.so", "fbgemm_gpu_py.so")


def load_fbgemm() -> None:
    """Check the pins, then load FBGEMM's libraries.

    The package itself is not imported, because its __init__ also loads the libraries for training and the meta
    operators for compilers: 500 modules such as sympy, with 35 MB and half a second in each process.

    Raises:
        EnvironmentMismatch: an installed version differs from its pin (`serving.pins`), or a library is missing or
            cannot be loaded.

    Warns:
        SlowKernelWarning: FBGEMM does not use the processor's vector instructions.
    """
    check_pins()
    spec = importlib.util.find_spec("fbgemm_gpu")
    assert spec is not None  # noqa: S101  it is installed: its pin was checked
    assert spec.origin is not None  # noqa: S101
    for name in _LIBRARIES:
        path = Path(spec.origin).with_name(name)
        if not path.exists():
            raise mismatch(f"{path}: expected a library of FBGEMM, found none", is_broken=True)
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:  # such as a CUDA build without CUDA's libraries
            raise mismatch(f"{path}: cannot be loaded: {error}", is_broken=True) from error
    warn_of_slow_kernels()


class ProgramForm(StrEnum):
    """How a process runs the lookup of a bundle."""

    TORCHSCRIPT = "torchscript"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """The lookup program of a bundle in this process.

    Attributes:
        program: has `forward`, which takes `program_arguments` of `serving.lookup.batch_answer`, and the requested
            methods.
        form: TORCHSCRIPT: from `program.pt`. PLAIN: a module built from the manifest.
        failure: why `program.pt` is not used, in a line; None if it is used, or the bundle has none.
    """

    program: Any
    form: ProgramForm
    failure: str | None = None


def load_program(
    bundle: Bundle,
    weights: Sequence[Tensor],
    methods: Sequence[str] = (),
    added: Sequence[Callable[..., None]] = (),
) -> LoadedProgram:
    """Load the lookup program of a bundle over its weights: its TorchScript, or else a plain module.

    Args:
        bundle: the bundle.
        weights: the bytes of each rank, uint8.
        methods: the methods of the program that are called beside `forward`.
        added: functions that become methods of the program. Their source must be valid TorchScript.

    Raises:
        EnvironmentMismatch: torch and FBGEMM do not work together.
        BundleError: `program.pt` changed after the export, or it belongs to another manifest.
    """
    load_fbgemm()
    script, failure = load_torchscript(bundle)
    if script is not None:
        try:
            return LoadedProgram(_frozen(script, weights, methods, added), ProgramForm.TORCHSCRIPT)
        except Exception as error:  # torch does not say of which types
            failure = _failure(bundle, error)
    program = build_program(bundle.manifest)
    program.weights_host = [*weights]  # type: ignore[assignment]
    # In the module itself, methods that refer to it would keep its weights mapped until the next garbage collection.
    callables = {name: getattr(program, name) for name in ("forward", *methods)}
    callables |= {function.__name__: MethodType(function, program) for function in added}
    return LoadedProgram(SimpleNamespace(**callables), ProgramForm.PLAIN, failure)


def load_torchscript(bundle: Bundle) -> "tuple[torch.jit.ScriptModule | None, str | None]":
    """The `program.pt` of a bundle, without weights, and why torch cannot load it.

    Returns:
        The program and None; None and a line; or, if the bundle has no `program.pt`, None and None.

    Raises:
        BundleError: the file changed after the export, or it belongs to another manifest.
    """
    if PROGRAM not in bundle.manifest.files:
        return None, None
    # TorchScript is code. Load the bytes that were compared with their digest, because the file may change after
    # that.
    content = io.BytesIO(read_checked(bundle.path / PROGRAM, bundle.manifest.files[PROGRAM]))
    try:
        with torchscript():
            program = torch.jit.load(content, map_location="cpu")  # type: ignore[no-untyped-call]
    except Exception as error:  # torch does not say of which types
        return None, _failure(bundle, error)
    if getattr(program, "placement_digest", None) != bundle.manifest.placement_digest:
        raise BundleError(f"{bundle.path / PROGRAM}: was compiled for another manifest: publish the bundle again")
    return program, None


def _failure(bundle: Bundle, error: Exception) -> str:
    return f"{bundle.path / PROGRAM}: torch {torch.__version__} cannot load it: {one_line(error)}"


def _frozen(
    program: "torch.jit.ScriptModule",
    weights: Sequence[Tensor],
    methods: Sequence[str],
    added: Sequence[Callable[..., None]],
) -> Any:
    """`program` over weights, with its constants folded.

    Functions in `added` become methods of the program, and are freed with it. `torch.jit.script` would keep what it
    compiles, together with the mapped weights files, until the process ends.
    """
    program.weights_host = [*weights]
    with torchscript():
        for function in added:
            program.define(textwrap.dedent(inspect.getsource(function)))
        names = [*methods, *(function.__name__ for function in added)]
        return torch.jit.freeze(program.eval(), preserved_attrs=names)
