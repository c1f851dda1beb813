"""The paths of modules in a model, for state-dict keys and messages."""

from torch import nn


def named(path: str, module: nn.Module) -> str:
    """The path and the class of a module, for messages."""
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def dotted(*parts: str) -> str:
    """Join the parts of a module's path. The path of the outermost module is ""."""
    return ".".join(filter(None, parts))
