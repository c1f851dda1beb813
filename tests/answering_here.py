"""Stands in for an export's last check, which starts a Python: the same, in this one, at a tenth of the time."""

from pathlib import Path
from typing import Any

import numpy.typing as npt

from export.probe import Probe
from serving.engine import Engine
from serving.kjt import Tensors


def answer(directory: Path, probe: Probe) -> npt.NDArray[Any]:
    """As `export.probe.run_reloaded`."""
    return Engine.open(directory).answer(Tensors(None, probe.values, probe.lengths.ravel(), probe.weights))
