"""The program of a bundle: loaded, and ready to be called."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from serving.bundle.digests import read_checked
from serving.bundle.manifest import PROGRAM
from serving.bundle.opening import Bundle
from serving.errors import BundleError
from serving.ranks.fbgemm import load_fbgemm


@contextmanager
def torchscript() -> Iterator[None]:
    """Silence the warning that TorchScript is deprecated. torch.export cannot call FBGEMM in a server yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        yield


def load_program(bundle: Bundle) -> torch.jit.ScriptModule:
    """Load the program of `bundle`, without weights.

    Raises:
        EnvironmentMismatch: torch and FBGEMM do not work together.
        BundleError: the program changed after the export, torch cannot load it, or it belongs to another manifest.
    """
    load_fbgemm()
    program = load_torchscript(bundle, PROGRAM)
    if getattr(program, "layout", None) != bundle.manifest.layout:
        raise BundleError(f"{bundle.path / PROGRAM}: was compiled for another manifest: publish the bundle again")
    return program


def load_torchscript(bundle: Bundle, name: str) -> torch.jit.ScriptModule:
    """Load the file `name` of `bundle`, which is TorchScript.

    Raises:
        BundleError: the file changed after the export, or torch cannot load it.
    """
    path = bundle.path / name
    # TorchScript is code. Load the bytes that were compared with their digest: the file may change meanwhile.
    code = io.BytesIO(read_checked(path, bundle.manifest.files[name]))
    try:
        with torchscript():
            return torch.jit.load(code, map_location="cpu")  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError as error:
        raise BundleError(f"{path}: torch {torch.__version__} cannot load it: {error}") from error
