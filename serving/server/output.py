"""What a tritonserver says: passed on as it comes, its last words kept to tell why it ended."""

import re
import threading
from collections import deque
from contextlib import suppress
from typing import BinaryIO

_KEPT = 200
# An error in its log; what comes before the text is the time, the process and a line of Triton's code.
_ERROR = re.compile(r"E\d{4} [^\]]*\] \"?(.*?)\"?$")
_FATAL = re.compile(r"error: (.*)")
# What Triton adds to a reason that a Python model gave: the line of our code that gave it.
_AT = re.compile(r"\\n\\nAt:.*")
# Said by every server without a GPU.
_NO_GPU = "CudaDriverHelper"
# An option that it does not know has it print four hundred lines about those that it does.
_USAGE = b"Usage: tritonserver"
_PATIENCE_S = 2.0


class Output:
    """Copies what a server says, line by line, on a thread of its own, until the server has ended.

    Args:
        source: the end of a pipe that the server writes to.
        sink: takes every line.
    """

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def reason(self) -> str:
        """Why a server that has ended did, in one line: its last error, else the last thing that it said."""
        self.drain()
        lines = [line for line in list(self._lines) if line.strip() and _NO_GPU not in line]
        said = _matches(_ERROR, lines) or _matches(_FATAL, lines) or lines or ["it said nothing"]
        return _AT.sub("", said[-1])

    def drain(self) -> None:
        """Wait until all was copied; not for long, since a model's process may have the pipe open for a while."""
        self._thread.join(_PATIENCE_S)

    def _copy(self) -> None:
        is_usage = False
        with self._source:
            for line in self._source:
                is_usage = is_usage or line.startswith(_USAGE)
                if not is_usage:
                    self._lines.append(line.decode(errors="replace").rstrip())
                    with suppress(OSError, ValueError):  # nobody reads it any more; the server must not wait for that
                        self._sink.write(line)


def _matches(pattern: re.Pattern[str], lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := pattern.match(line))]
