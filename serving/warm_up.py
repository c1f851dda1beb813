"""Answer what was captured before Triton calls the model ready: pages are read and code is warm."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from serving.capture import WARM_UP, read_captured
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.kjt import Tensors


def warm_up(engine: Engine, model: Path) -> None:
    """Look up every request of `model`/warm_up.jsonl that the engine can answer; nothing where there is none.

    Raises:
        InvalidRequest: the file holds something else than captured requests.
    """
    path = model / WARM_UP
    if not os.path.lexists(path):
        return
    for captured in read_captured(path):
        with suppress(InvalidRequest):  # it was captured because it is refused
            engine.answer(with_weights(captured.tensors, engine.schema.weighted))


def with_weights(tensors: Tensors, weighted: bool) -> Tensors:
    """A captured request for a model that may be weighted: a weight of 1 for each id."""
    weights = np.ones(tensors.values.size, np.float32) if weighted else None
    return Tensors(tensors.features, tensors.values, tensors.lengths, weights)
