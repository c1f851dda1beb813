"""What runs inside a model's process of Triton's Python backend, and answers requests."""

import gc
import sys
from types import ModuleType
from typing import Any

# What torch imports to trace and to compile alone: the operators' meta kernels in Python. A model's process runs what
# is compiled already.
_FOR_TRACING = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def __getattr__(name: str) -> Any:
    """Import `TritonPythonModel` on first use. The model.py of every published version imports it from here.

    What it imports itself exists only inside Triton. Most of a model's start is torch. `_FOR_TRACING` is left out: a
    quarter of that time, and 18 MB. The garbage collector would go through torch's 170,000 objects again and again
    meanwhile, and once more for 70 ms while requests wait: none of them goes before the process does.
    """
    if name == "TritonPythonModel":
        sys.modules.update((each, ModuleType(each)) for each in _FOR_TRACING if each not in sys.modules)
        gc.disable()
        try:
            from serving.backend.triton import TritonPythonModel
        finally:
            gc.freeze()
            gc.enable()
        return TritonPythonModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
