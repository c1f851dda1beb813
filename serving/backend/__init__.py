"""What runs inside a model's process of Triton's Python backend, and answers requests."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `TritonPythonModel` on first use. The model.py of every published version imports it from here.

    What it imports itself exists only inside Triton.
    """
    if name == "TritonPythonModel":
        from serving.backend.triton import TritonPythonModel

        return TritonPythonModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
