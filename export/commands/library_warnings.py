"""Keep the warnings of libraries out of a command's output: the user cannot act on them."""

import logging
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO

# torch's C++ code adds this to its warnings, which name the line of Python that called it.
_OF_CPP = "(Triggered internally at"


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside the block, warnings of libraries are dropped. Those of the user's own code are shown, and errors of all.

    What was asked for is shown: PYTHONWARNINGS, `python -W`, and what libraries log below warnings.
    """
    handle = logging.Logger.handle

    def handle_users(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno != logging.WARNING or not is_installed(record.pathname):
            handle(logger, record)

    # Not by handlers: torch has its own, and a library that calls logging.info sets up the root's.
    logging.Logger.handle = handle_users  # type: ignore[assignment,method-assign]
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                _show_users_warnings()
            yield
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]


def _show_users_warnings() -> None:
    show = warnings.showwarning

    def show_users(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if _is_users(message):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_users


def _is_users(message: Warning | str) -> bool:
    """Whether the user's own code warns, rather than a library that names a line of it."""
    if _OF_CPP in str(message):
        return False
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, warnings.__file__) and frame.f_back is not None:
        frame = frame.f_back
    return not is_installed(frame.f_code.co_filename)


def is_installed(filename: str) -> bool:
    """Whether a file is Python's, an installed package's or this package's, rather than the user's own code."""
    return filename.startswith((*_folders(), "<frozen")) or not _PACKAGES.isdisjoint(Path(filename).parts)


_PACKAGES = {"site-packages", "dist-packages"}


@cache
def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    export = Path(__file__).parents[1]
    own = (export, export.parent / "serving")
    return *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")), *map(str, own)
