"""An export's last check at a tenth of its time, for tests that are not about it.

It starts a Python, which takes three seconds: here the bundle is reloaded in this one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from export.parity.fresh_process import FreshProcess
from serving.engine import Engine
from serving.request.tensors import Outputs, Tensors


@contextmanager
def quick_reload() -> Iterator[None]:
    """Inside the block, exports of this process reload their bundles in it."""
    with (
        mock.patch.object(FreshProcess, "__enter__", _enter),
        mock.patch.object(FreshProcess, "__exit__", return_value=None),
        mock.patch.object(FreshProcess, "outputs", _answer),
    ):
        yield


def _enter(fresh: FreshProcess) -> FreshProcess:
    """Start nothing."""
    return fresh


def _answer(_: FreshProcess, directory: Path, probe: Tensors) -> Outputs:
    """As `export.parity.fresh_process.FreshProcess.outputs`."""
    return Engine.open(directory).outputs(probe)
