"""Triton's Python backend over an engine: decode, check, merge, one TBE call, split.

`model.py` of every exported version imports `TritonPythonModel` from here. This is the only file that imports
`triton_python_backend_utils`, which exists inside the backend alone.
"""

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from serving import kjt
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.kjt import Embeddings, KjtRequest
from serving.metrics import LookupMetrics, Publisher, triton_counters


class TritonPythonModel:
    """One model instance: an engine, and the requests that Triton's dynamic batcher hands it together."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the version's bundle."""
        # A TBE call on CPU runs on one thread; a pool for the rest would only take cores from other instances.
        torch.set_num_threads(1)
        self._engine = Engine.open(Path(args["model_repository"]) / args["model_version"])
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = LookupMetrics(triton_counters(pb_utils), labels, self._engine.schema)
        self._publisher = Publisher(self._metrics.publish)

    def finalize(self) -> None:
        """Publish the last counts."""
        self._publisher.stop()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer `requests`, each with its embeddings or its own error, with one TBE call."""
        responses: list[Any] = [None] * len(requests)
        valid: dict[int, KjtRequest] = {}
        for position, request in enumerate(requests):
            try:
                valid[position] = self._decode(request)
            except InvalidRequest as error:
                self._metrics.rejected()
                responses[position] = _refusal(str(error), pb_utils.TritonError.INVALID_ARG)
            except Exception:
                responses[position] = _failures(1)[0]
        if valid:
            for position, response in zip(valid, self._respond(list(valid.values())), strict=True):
                responses[position] = response
        return responses

    def _decode(self, request: Any) -> KjtRequest:
        return kjt.check(
            self._engine.schema,
            _row(request, "values"),
            _row(request, "lengths"),
            _row(request, "weights") if self._engine.schema.weighted else None,
            _features(request.parameters()),
        )

    def _respond(self, requests: list[KjtRequest]) -> list[Any]:
        try:
            answers = self._answer(requests)
        except Exception:
            return _failures(len(requests))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embeddings", answer[np.newaxis])]) for answer in answers]

    def _answer(self, requests: list[KjtRequest]) -> list[Embeddings]:
        merged = kjt.merge(requests)
        embeddings = self._engine.answer(merged)
        self._metrics.answered(requests)
        return kjt.split(embeddings, merged, requests, self._engine.schema)


def _row(request: Any, name: str) -> np.ndarray[Any, Any]:
    """The one row of an input [1, n]. as_numpy() copies, so it is private and aligned."""
    array: np.ndarray[Any, Any] = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    if array.ndim != 2 or array.shape[0] != 1:
        raise InvalidRequest(f"{name}: expected shape [1, n], got {list(array.shape)}")
    row: np.ndarray[Any, Any] = array[0]
    return row


def _features(parameters: str) -> Sequence[str] | None:
    """The request parameter `features`: comma-separated names, or None for the default."""
    if not parameters:
        return None
    features = json.loads(parameters).get("features")
    if features is None:
        return None
    if not isinstance(features, str):
        raise InvalidRequest(f"parameter features: expected comma-separated names, got {features!r}")
    return features.split(",") if features else []


def _failures(count: int) -> list[Any]:
    """Inside `except`, for what no check foresaw: the log gets the trace, each caller a fixed text."""
    pb_utils.Logger.log_error(f"lookup failed: {traceback.format_exc()}")
    failed = "lookup failed: the server's log says why"
    return [_refusal(failed, pb_utils.TritonError.INTERNAL) for _ in range(count)]


def _refusal(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
