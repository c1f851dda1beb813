"""What runs inside a model's process of Triton's Python backend, and answers requests."""

import gc
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `TritonPythonModel` on first use. The model.py of every published version imports it from here.

    What it imports itself exists only inside Triton. Most of a model's start is torch's 170,000 objects. The garbage
    collector would go through them again and again meanwhile, and once more for 70 ms while requests wait: none of
    them goes before the process does.
    """
    if name == "TritonPythonModel":
        gc.disable()
        try:
            from serving.backend.triton import TritonPythonModel
        finally:
            gc.freeze()
            gc.enable()
        return TritonPythonModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
