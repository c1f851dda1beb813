"""Make torch and FBGEMM share one description of the processor.

FBGEMM chooses its CPU kernels by cpuinfo, which it takes from torch's libraries. In torch 2.14 two of them export it,
libc10.so and libtorch.so. torch fills one copy and FBGEMM reads the other, finds no vector instructions, and uses its
reference kernels: lookups take 10 to 30 times as long. The linker gives both the same copy if the library that has it
is among the global symbols before FBGEMM is loaded.
"""

import ctypes
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path


def share_cpuinfo() -> None:
    """Make the symbols of one of torch's libraries global. Does nothing where torch is not installed.

    Before torch is imported, that is libc10.so: the rest of torch then binds to its copy. It loads in a millisecond,
    and torch is not imported. After torch is imported, it is libtorch.so, whose copy torch has bound to. After FBGEMM
    is imported, as `import torchrec` does, it is too late: `serving.lookup.instruction_set` warns of that.

    `serving/__init__.py` calls this, so it comes before any import of torch in this package.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    library = "libtorch.so" if "torch" in sys.modules else "libc10.so"
    with suppress(OSError):  # importing torch fails for the same reason, and says why
        ctypes.CDLL(str(Path(torch.origin).parent / "lib" / library), mode=ctypes.RTLD_GLOBAL)
