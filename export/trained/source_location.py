"""Lines of the model's code, for messages: of a graph's node, of an error, and of what is running."""

import linecache
import re
import sysconfig
import traceback
from pathlib import Path

import torch
import torchrec
from torch import fx

_OURS = Path(__file__).parents[1]
_NOT_THE_USERS = (Path(torch.__file__).parent, Path(torchrec.__file__).parent, _OURS)
_PYTHONS = Path(sysconfig.get_path("stdlib"))
# A line of a stack trace as torch.fx keeps it.
_FRAME = re.compile(r'File "(.+)", line ([0-9]+), in ')


def line_of(node: fx.Node) -> str:
    """The line of the model's code that made a node of a graph; "" if the node has no stack trace."""
    for path, line in reversed(_FRAME.findall(node.stack_trace or "")):
        if _is_file_to_name(Path(path)):
            return location(path, int(line))
    return ""


def short_line_of(node: fx.Node) -> str:
    """As `line_of`, but with the file's name instead of its path: bundles must not contain paths."""
    return shortened(line_of(node))


def shortened(line: str) -> str:
    """A line as `location` writes it, without the folders of its file."""
    return re.sub(r"^ at .*/(?=[^/]+, line [0-9]+: )", " at ", line)


def line_of_error(error: Exception) -> str:
    """The line of the model's code that raised an error: the innermost one that is not torch's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.lineno is not None and _is_file_to_name(Path(frame.filename)):
            return location(frame.filename, frame.lineno)
    return ""


def current_line() -> str:
    """The line of the model's code that is running: the innermost one that is not torch's, or ""."""
    frames = traceback.extract_stack()
    ours = next((index for index, frame in enumerate(frames) if Path(frame.filename).is_relative_to(_OURS)), 0)
    for frame in reversed(frames[ours:]):  # the frames before called the export
        if frame.lineno is not None and _is_file_to_name(Path(frame.filename)):
            return location(frame.filename, frame.lineno)
    return ""


def is_user_code(path: Path) -> bool:
    """Whether a file is none of torch, torchrec or this package."""
    return path.exists() and not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def _is_file_to_name(path: Path) -> bool:
    """Whether a file is the user's, and not part of Python itself, as copy.py is."""
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return is_user_code(path) and (is_installed or not path.is_relative_to(_PYTHONS))


def location(path: str, line: int) -> str:
    """A line of a file, for messages."""
    return f" at {path}, line {line}: `{linecache.getline(path, line).strip()}`"
