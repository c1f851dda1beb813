"""The model that Triton's Python backend runs: it answers requests in the model's process."""

import gc
import sys
from types import ModuleType
from typing import Any

# Modules of torch that are only needed for tracing and compiling (the operators' meta kernels in Python). A model's
# process runs compiled programs.
_FOR_TRACING = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def __getattr__(name: str) -> Any:
    """Import `TritonPythonModel` on first use. The model.py of every published version imports it from here.

    It imports a module that exists only inside Triton. Importing torch is most of a model's start; leaving out
    `_FOR_TRACING` saves a quarter of that time, and 18 MB. torch's 170,000 objects live as long as the process, so
    the garbage collector is kept from visiting them: during the import, and later for 70 ms while requests wait.
    """
    if name == "TritonPythonModel":
        sys.modules.update((module, ModuleType(module)) for module in _FOR_TRACING if module not in sys.modules)
        gc.disable()
        try:
            from serving.backend.triton import TritonPythonModel
        finally:
            gc.freeze()
            gc.enable()
        return TritonPythonModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
