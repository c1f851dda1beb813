"""Load the TorchScript of a bundle, and the libraries of FBGEMM that it calls."""

import importlib.util
import io
from pathlib import Path

import torch

from serving.bundle.load import Bundle, read_checked
from serving.bundle.manifest import PROGRAM
from serving.errors import BundleError
from serving.lookup.instruction_set import warn_of_slow_kernels
from serving.pins import check_pins, mismatch
from serving.torchscript import torchscript

# TBE's lookups, and the operators that split and join jagged tensors. They load the libraries that they need.
_LIBRARIES = ("fbgemm_gpu_tbe_inference.so", "fbgemm_gpu_py.so")


def load_fbgemm() -> None:
    """Check the pins, then load FBGEMM's libraries.

    The package itself is not imported. Its __init__ also loads the libraries for training and the meta operators for
    compilers. That is 500 modules, sympy among them: 35 MB and half a second in each process.

    Raises:
        EnvironmentMismatch: an installed version differs from its pin (`serving.pins`), or a library is missing, or
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


def load_program(bundle: Bundle) -> torch.jit.ScriptModule:
    """Load the lookup program of `bundle`, without weights files.

    Raises:
        EnvironmentMismatch: torch and FBGEMM do not work together.
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """
    load_fbgemm()
    program = load_torchscript(bundle, PROGRAM)
    if getattr(program, "placement_digest", None) != bundle.manifest.placement_digest:
        raise BundleError(f"{bundle.path / PROGRAM}: was compiled for another manifest: publish the bundle again")
    return program


def load_torchscript(bundle: Bundle, name: str) -> torch.jit.ScriptModule:
    """Load the file `name` of `bundle`, which is TorchScript.

    Raises:
        BundleError: the file changed after the export, or torch cannot load it.
    """
    path = bundle.path / name
    # TorchScript is code. Load the very bytes that were compared with their digest: the file may change after that.
    code = io.BytesIO(read_checked(path, bundle.manifest.files[name]))
    try:
        with torchscript():
            return torch.jit.load(code, map_location="cpu")  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError as error:
        raise BundleError(f"{path}: torch {torch.__version__} cannot load it: {error}") from error
