"""Follow the forward of a model, its collections as single steps. What cannot be followed is refused by its line."""

import linecache
import re
import traceback
from collections.abc import Collection
from pathlib import Path

import torch
import torchrec.fx
from torch import fx, nn

from export.errors import ModelError, first_line
from export.quiet import quiet
from export.trained.modules import evaluating

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(torchrec.fx.__file__).parent, Path(__file__).parent)
# A line of a stack trace as torch.fx keeps it.
_FRAME = re.compile(r'File "(.+)", line ([0-9]+), in ')
WAY_OUT = "give export_model(dense=…), a module of your own that takes pooled embeddings, or export without --scores"


def traced(entry: nn.Module, collections: Collection[nn.Module]) -> fx.GraphModule:
    """The whole forward of `entry` as a graph. Its modules are those of `entry`.

    Args:
        entry: the model.
        collections: each call of one is a node.

    Raises:
        ModelError: naming the line of the model's code that cannot be followed.
    """
    with evaluating(entry), quiet():
        try:
            return fx.GraphModule(entry, _Tracer(collections).trace(entry), type(entry).__name__)
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"{type(entry).__name__}: its forward cannot be followed{_line_of(error)}: "
                f"{first_line(error)}: {WAY_OUT}"
            ) from error


def line_of(node: fx.Node) -> str:
    """Where in the model's code a step of a graph is, for messages."""
    for path, line in reversed(_FRAME.findall(node.stack_trace or "")):
        if _is_users(Path(path)):
            return _where(path, int(line))
    return ""


class _Tracer(torchrec.fx.Tracer):  # type: ignore[misc]
    record_stack_traces = True

    def __init__(self, collections: Collection[nn.Module]) -> None:
        super().__init__()
        self._collections = collections

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._collections or super().is_leaf_module(m, module_qualified_name)


def _line_of(error: Exception) -> str:
    """Where in the model's code an error arose: the innermost line that is not torch's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.lineno is not None and _is_users(Path(frame.filename)):
            return _where(frame.filename, frame.lineno)
    return ""


def _is_users(path: Path) -> bool:
    return path.exists() and not any(path.is_relative_to(each) for each in _NOT_THE_USERS)


def _where(path: str, line: int) -> str:
    return f" at {path}, line {line}: `{linecache.getline(path, line).strip()}`"
