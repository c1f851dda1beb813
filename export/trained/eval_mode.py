"""Run a module in eval mode, and without the log lines of TorchRec and torch."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode, and restore the mode of each part at the end of the block."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
