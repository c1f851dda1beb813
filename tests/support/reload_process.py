"""Where an export's last check reloads the bundle.

A fresh process is what users have. It takes three seconds, so tests that are not about it reload in this one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from export.parity.fresh_process import FreshProcess
from serving.bundle.scores import DenseFormat
from serving.requests.types import Array, Outputs, Tensors

_FRESH: dict[str, Any] = {name: vars(FreshProcess)[name] for name in ("__enter__", "__exit__", "outputs", "scores")}


@contextmanager
def in_this_process() -> Iterator[None]:
    """Inside the block, exports of this process reload their bundles in it."""
    patches: dict[str, Any] = {"__enter__": lambda fresh: fresh, "__exit__": lambda *_: None}
    patches |= {"outputs": _answer, "scores": _score}
    with mock.patch.multiple(FreshProcess, **patches):
        yield


@contextmanager
def in_a_fresh_process() -> Iterator[None]:
    """Inside the block, they do as everybody's, also within `in_this_process`."""
    with mock.patch.multiple(FreshProcess, **_FRESH):
        yield


def _answer(_: FreshProcess, directory: Path, probe: Tensors) -> Outputs:
    """As `export.parity.fresh_process.FreshProcess.outputs`."""
    from serving.engine import Engine

    return Engine.open(directory).outputs(probe)


def _score(_: FreshProcess, file: Path, format_: DenseFormat, inputs: Sequence[Array]) -> list[Array]:
    """As `export.parity.fresh_process.FreshProcess.scores`."""
    import torch

    from serving.lookup.dense_files import load_dense_file

    with torch.inference_mode():
        outputs = load_dense_file(format_, file.read_bytes())(*map(torch.from_numpy, inputs))
    return [tensor.numpy() for tensor in outputs]
