"""An export's last check at a tenth of its time, for tests that are not about it.

It starts a Python, which takes three seconds: here the bundle is reloaded in this one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy.typing as npt

from serving.engine import Engine
from serving.request.tensors import Tensors


@contextmanager
def quick_reload() -> Iterator[None]:
    """Inside the block, exports of this process reload their bundles in it."""
    with mock.patch("export.parity.answers.run_reloaded", _answer):
        yield


def _answer(directory: Path, probe: Tensors) -> npt.NDArray[Any]:
    """As `export.parity.probe.run_reloaded`."""
    return Engine.open(directory).answer(probe)
