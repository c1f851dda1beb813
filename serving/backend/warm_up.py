"""Warm-up: captured requests are answered before a model is ready, so that pages are read and code is warm."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from serving.engine import Engine
from serving.errors import HostUnavailable, InvalidRequest
from serving.request.captured import WARM_UP, PassedOver, read_captured
from serving.request.tensors import Tensors


def warm_up(engine: Engine, model: Path, warn: Callable[[str], None]) -> None:
    """Answer every request in `model`/warm_up.jsonl, if there is such a file. Requests that are refused, or need a
    host that does not answer, are skipped. So are lines that are no requests: `warn` gets a line that says so.

    Raises:
        ConfigurationError: the file cannot be read, or no line is a captured request.
    """
    path = model / WARM_UP
    if not os.path.lexists(path):
        return
    passed_over = PassedOver()
    for captured in read_captured(path, passed_over):
        with suppress(InvalidRequest, HostUnavailable):  # it may have been captured for being refused
            engine.outputs(with_weights(captured.tensors, engine.schema.weighted))
    for line in passed_over.said(path):
        warn(line)


def with_weights(tensors: Tensors, weighted: bool) -> Tensors:
    """A captured request as a model takes it: with a weight of 1 for each id, float32 [N], if it is weighted."""
    weights = np.ones(tensors.values.size, np.float32) if weighted else None
    return replace(tensors, weights=weights)
