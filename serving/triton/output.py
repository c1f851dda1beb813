"""What a tritonserver says: logged line by line, and searched for the reason why the server ended.

Run with Triton 24.10. The source of 26.04 was read: its log has the same format.
"""

import logging
import re
import threading
from collections import deque
from typing import BinaryIO

from serving.log import NO_GPU, triton_record

_LINES_KEPT = 200
# An error in the log. Before its text come the time, the process and a line of Triton's code.
_ERROR = re.compile(r"E\d{4} [^\]]*\] \"?(.*?)\"?$")
_FATAL = re.compile(r"error: (.*)")
# Triton adds the line of code to an error that a Python model raised.
_AT = re.compile(r"\\n\\nAt:.*")
# After an unknown option, tritonserver prints four hundred lines about its options. They begin with this.
_USAGE = b"Usage: tritonserver"
_PATIENCE_S = 2.0


class Output:
    """Logs what a server says, line by line, on a thread of its own, until the server has ended.

    Args:
        source: the pipe that the server writes to.
        log: takes every line.
        name: of who says it.
    """

    def __init__(self, source: BinaryIO, log: logging.Logger, name: str = "triton") -> None:
        self._source, self._name = source, name
        self._log = log
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def reason(self) -> str:
        """One line that says why the server ended: the last error in its log, or else its last line."""
        self.drain()
        lines = [line for line in list(self._lines) if line.strip() and NO_GPU not in line]
        said = _matches(_ERROR, lines) or _matches(_FATAL, lines) or lines or ["it said nothing"]
        return _AT.sub("", said[-1])

    def drain(self) -> None:
        """Wait until all lines are copied, for 2 s at most: a model's process may keep the pipe open."""
        self._thread.join(_PATIENCE_S)

    def _copy(self) -> None:
        is_usage = False
        with self._source:
            for line in self._source:
                is_usage = is_usage or line.startswith(_USAGE)
                if not is_usage:
                    said = line.decode(errors="replace").rstrip()
                    self._lines.append(said)
                    self._log.handle(triton_record(said, self._name))


def _matches(pattern: re.Pattern[str], lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := pattern.match(line))]
