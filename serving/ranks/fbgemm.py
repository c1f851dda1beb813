"""FBGEMM's operators, registered with torch for programs to call."""

import importlib.util
from pathlib import Path

import torch

from serving.errors import EnvironmentMismatch
from serving.pins import INSTALL, check_pins

# TBE's lookups, and the operators that split and join jagged tensors. They bring what they need themselves.
_LIBRARIES = ("fbgemm_gpu_tbe_inference.so", "fbgemm_gpu_py.so")


def load_fbgemm() -> None:
    """Check the pins, then load FBGEMM's libraries.

    The package itself is not imported. Its __init__ loads these libraries, those for training, and meta operators for
    compilers: 500 modules, sympy among them, 35 MB and half a second for each process.

    Raises:
        EnvironmentMismatch: as `serving.pins.check_pins`; or a library is missing.
    """
    check_pins()
    spec = importlib.util.find_spec("fbgemm_gpu")
    assert spec is not None  # noqa: S101  it is installed: its pin was checked
    assert spec.origin is not None  # noqa: S101
    for name in _LIBRARIES:
        path = Path(spec.origin).with_name(name)
        if not path.exists():
            raise EnvironmentMismatch(f"{path}: expected a library of FBGEMM, found none: {INSTALL}")
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
