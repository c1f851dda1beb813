"""Keep library warnings out of a command's output: users cannot act on them."""

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
    """Inside the block, library warnings are dropped. Warnings of the user's code, and all errors, are shown.

    PYTHONWARNINGS and `python -W` override this. Log records below warnings are not changed.
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
    """Whether the warning comes from the user's code, rather than from a library that names a line of that code."""
    if _OF_CPP in str(message):
        return False
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, warnings.__file__) and frame.f_back is not None:
        frame = frame.f_back
    return not is_installed(frame.f_code.co_filename)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to Python, an installed package or this package, rather than to the user."""
    return filename.startswith((*_folders(), "<frozen")) or not _PACKAGES.isdisjoint(Path(filename).parts)


_PACKAGES = {"site-packages", "dist-packages"}


@cache
def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    export = Path(__file__).parents[1]
    installed = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts"))
    return *installed, str(export), str(export.parent / "serving")
