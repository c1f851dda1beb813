"""Lines of a model's own code, for messages."""

import linecache
import re
import traceback
from pathlib import Path

import torch
import torchrec
from torch import fx

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(torchrec.__file__).parent, Path(__file__).parents[1])
# A line of a stack trace as torch.fx keeps it.
_FRAME = re.compile(r'File "(.+)", line ([0-9]+), in ')


def line_of(node: fx.Node) -> str:
    """Where in the model's code a step of a graph is; empty where its stack trace was not kept."""
    for path, line in reversed(_FRAME.findall(node.stack_trace or "")):
        if _is_users(Path(path)):
            return _where(path, int(line))
    return ""


def short_line_of(node: fx.Node) -> str:
    """As `line_of`, with the name of the file alone: for what goes into bundles."""
    return re.sub(r"^ at .*/(?=[^/]+, line [0-9]+: )", " at ", line_of(node))


def line_of_error(error: Exception) -> str:
    """Where in the model's code an error arose: the innermost line that is not torch's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.lineno is not None and _is_users(Path(frame.filename)):
            return _where(frame.filename, frame.lineno)
    return ""


def _is_users(path: Path) -> bool:
    return path.exists() and not any(path.is_relative_to(each) for each in _NOT_THE_USERS)


def _where(path: str, line: int) -> str:
    return f" at {path}, line {line}: `{linecache.getline(path, line).strip()}`"
