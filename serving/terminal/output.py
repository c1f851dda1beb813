"""What commands print: on any terminal, into any pipe, in any encoding. To print never ends a command."""

import codecs
import errno
import os
import sys
from typing import Any, TextIO

# The characters of our own texts that are not ASCII, for an output that cannot have them.
_PLAIN = str.maketrans({"→": "->", "↔": "<->", "…": "...", "–": "-", "−": "-", "×": "x", "·": "*", "≤": "<="})
# How such an output is made to take all text: a name for `reconfigure(errors=…)`.
TAKE_ALL = "tbe-output"


def _encoded(error: UnicodeError) -> tuple[bytes, int]:
    """Other bytes for what an encoding does not have.

    A byte of a path that is not UTF-8 is written as it is, and any other character as JSON escapes it.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return b"".join(_bytes(character) for character in text), error.end


def _bytes(character: str) -> bytes:
    if "\udc80" <= character <= "\udcff":
        return character.encode("ascii", "surrogateescape")
    return character.encode() if character.isascii() else escaped(character).encode()


codecs.register_error(TAKE_ALL, _encoded)


def escaped(text: str) -> str:
    """A text in ASCII, with the other characters as JSON escapes them."""
    utf_16 = (character.encode("utf-16-be", "surrogatepass").hex() for character in text)
    return "".join(
        character
        if character.isascii()
        else "".join(f"\\u{code[start : start + 4]}" for start in range(0, len(code), 4))
        for character, code in zip(text, utf_16, strict=True)
    )


class Output:
    """A text stream whose writes never fail. If its reader has closed it, or a disk is full, the rest is dropped.

    Args:
        stream: the stream. None: it is closed.
        errors: how it writes what its encoding does not have. None: as it does.

    Attributes:
        problem: why what was written is lost. None: it is not.
    """

    def __init__(self, stream: Any, errors: str | None = None) -> None:
        self._stream: Any = stream or open(os.devnull, "w")  # noqa: SIM115  as long as the process
        if errors is not None:
            self._stream.reconfigure(errors=errors)
        self.problem: OSError | None = None

    def write(self, text: str) -> int:
        """Write `text`, unless something before it is lost."""
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Drop all that follows, and what is buffered: Python writes that in the end."""
        self.problem = self.problem or error
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def take_over() -> None:
    """Have the process print by `Output`, both to stdout and stderr, whose own errors are never strict."""
    sys.stdout, sys.stderr = Output(sys.stdout, TAKE_ALL), Output(sys.stderr)


def print_json(encoded: bytes | str) -> None:
    """Print JSON: in ASCII where the output has no UTF-8."""
    text = encoded if isinstance(encoded, str) else encoded.decode()
    is_utf8 = str(sys.stdout.encoding).lower().startswith("utf")
    print(text if is_utf8 else escaped(text), flush=True)


def lost() -> OSError | None:
    """Why output on stdout was lost, such as a full disk. None if none was lost, or its reader closed it."""
    problem = getattr(sys.stdout, "problem", None)
    return None if problem is None or problem.errno == errno.EPIPE else problem


def is_read() -> bool:
    """Whether somebody still takes what is printed on stdout."""
    return getattr(sys.stdout, "problem", None) is None


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream, which may be closed, is a terminal."""
    return stream is not None and stream.isatty()
