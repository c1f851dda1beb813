"""A version of a model: its tables lie beside this file, the code is in `serving`."""

from serving.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
