"""Keep other libraries' warnings off the screen."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what TorchRec and torch log, and their warnings of each other's code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for about in ("instance-level annotations", "quantized tensor creation functions"):
                warnings.filterwarnings("ignore", message=f".*{about}", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            yield
    finally:
        logging.disable(disabled)
