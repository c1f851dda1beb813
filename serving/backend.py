"""Triton's Python backend: requests in, embeddings or errors out.

`model.py` of every exported version imports `TritonPythonModel` from here. This is the only file that imports
`triton_python_backend_utils`, which exists inside the backend alone.
"""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from serving.answering import Answerer, Outcome
from serving.bundle import open_bundle, verify_digests, weights_changed_since
from serving.capture import Recorder
from serving.engine import Engine
from serving.errors import IdsOutside, InvalidRequest, Reason, RequestCancelled, ServerUnavailable, ServingError
from serving.kjt import Array, Tensors
from serving.metrics import LookupMetrics, Publisher, triton_families
from serving.presence import BUSY, IDLE, show
from serving.settings import RECOVERED, ServingSettings, parsed
from serving.signature import TrustedKeys
from serving.warm_up import warm_up

# Names of pb_utils.TritonError, whose members are there once the backend runs; INTERNAL for what is not here.
_STATUS = {
    InvalidRequest: "INVALID_ARG",
    IdsOutside: "INVALID_ARG",
    ServerUnavailable: "UNAVAILABLE",
    RequestCancelled: "CANCELLED",
}


class TritonPythonModel:
    """One model instance: an engine, and the requests that Triton's dynamic batcher hands it together."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the version's bundle and warm it up. What is wrong with it is said in one line, without a trace."""
        # A TBE call on CPU runs on one thread; a pool for the rest would only take cores from other instances.
        torch.set_num_threads(1)
        # Ignored in Triton, which does not wait for its models' processes; here it would hide how a child ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        show(IDLE)
        try:
            self._answerer, self._publisher = _load(args)
        except ServingError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def finalize(self) -> None:
        """Publish the last counts."""
        self._publisher.stop()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer `requests`, each with its embeddings or its own error."""
        show(BUSY)
        try:
            return [_response(outcome) for outcome in self._answerer.answer(requests, _decode, _is_gone)]
        finally:
            show(IDLE)


def _load(args: Mapping[str, str]) -> tuple[Answerer, Publisher]:
    model = Path(args["model_repository"])
    config = json.loads(args["model_config"])["parameters"]
    # An empty string may have been left out on its way through JSON.
    parameters = {key: value.get("string_value", "") for key, value in config.items()}
    settings = ServingSettings(**parsed(parameters))
    bundle = open_bundle(model / args["model_version"], TrustedKeys.of_environment())
    recovered = parameters.get(RECOVERED)
    is_verified = recovered is not None and not weights_changed_since(bundle, float(recovered))
    # Every instance: where one fails and another does not, Triton 2.51 may hang, and lose the version that serves.
    if settings.verify_weights and not is_verified:
        verify_digests(bundle)
    engine = Engine(bundle)
    warm_up(engine, model)
    manifest = bundle.manifest
    metrics = LookupMetrics(
        triton_families(pb_utils),
        {"model": args["model_name"], "version": args["model_version"]},
        [table.name for table in manifest.tables],
        manifest.exported_at,
    )
    if recovered is not None and args["model_instance_name"].endswith("_0"):  # once, whatever its instances
        metrics.recovered()
    recorder = Recorder.of(settings, args["model_name"], metrics.captured)
    answerer = Answerer(engine, settings.limits, metrics, recorder, pb_utils.Logger.log_error)
    return answerer, Publisher(metrics.publish)


def _is_gone(request: Any) -> bool:
    """Whether the caller cancelled, or its deadline passed."""
    gone: bool = request.is_cancelled()
    return gone


def _decode(request: Any) -> Tensors:
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    weights = inputs.get("weights")
    text = request.parameters()
    parameters = json.loads(text) if text else {}
    return Tensors(
        _features(parameters),
        _row("values", inputs["values"]),
        _row("lengths", inputs["lengths"]),
        None if weights is None else _row("weights", weights),
        parameters.get("traceparent"),
    )


def _row(name: str, tensor: Any) -> Array:
    """The one row of an input [1, n]. as_numpy() copies, so it is private and aligned."""
    array: Array = tensor.as_numpy()
    if array.ndim != 2 or array.shape[0] != 1:
        raise InvalidRequest(f"{name}: expected shape [1, n], got {list(array.shape)}", Reason.SHAPE)
    row: Array = array[0]
    return row


def _features(parameters: Mapping[str, Any]) -> list[str] | None:
    """The request parameter `features`: comma-separated names, or None for the default."""
    features = parameters.get("features")
    if features is None:
        return None
    if not isinstance(features, str):
        raise InvalidRequest(f"parameter features: expected comma-separated names, got {features!r}", Reason.FEATURES)
    return features.split(",") if features else []


def _response(outcome: Outcome) -> Any:
    if isinstance(outcome, ServingError):
        status = getattr(pb_utils.TritonError, _STATUS.get(type(outcome), "INTERNAL"))
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(outcome), status))
    return pb_utils.InferenceResponse([pb_utils.Tensor("embeddings", outcome[np.newaxis])])
