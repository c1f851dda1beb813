"""Triton's Python backend: requests in, outputs or errors out.

`model.py` of every exported version imports `TritonPythonModel` from here. This is the only file that imports
`triton_python_backend_utils`, which exists inside the backend alone.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from serving.backend.answering import Answerer
from serving.backend.dlpack import to_array, to_tensor
from serving.backend.host_metrics import HostMetrics
from serving.backend.metrics import Families, LookupMetrics, Publisher, triton_families
from serving.backend.page_metrics import PageMetrics
from serving.backend.process_health import Pauses, busy_byte, end_with_parent
from serving.backend.recorder import Recorder
from serving.backend.spans import Spans
from serving.bundle.load import open_bundle, verify_digests, weights_changed_since
from serving.bundle.manifest import PROGRAM
from serving.bundle.signature import TrustedKeys
from serving.bundle.tensor_names import ID_INPUTS
from serving.engine import Engine, Outcome
from serving.errors import (
    HostUnavailable,
    IdsOutside,
    InvalidRequest,
    ModelNotFound,
    Reason,
    RequestCancelled,
    ServerUnavailable,
    ServingError,
    shown,
)
from serving.freed_memory import FreedMemory
from serving.log import Sampled, about_model
from serving.lookup.dense_files import LoadedDensePart
from serving.lookup.instruction_set import instruction_set, slow_kernels
from serving.lookup.program import LoadedProgram, ProgramForm
from serving.model.settings import RECOVERED, ServingSettings, WeightsMemory, parsed
from serving.requests.captured import WARM_UP, SkippedLines, read_captured
from serving.requests.parameters import decode_parameters
from serving.requests.types import Array, Tensors
from serving.router.hosts_config import hosts_of

# The status of each error, as a member of pb_utils.TritonError; INTERNAL for other errors. They are kept by name,
# because the members exist only in a running backend.
_STATUS = {
    InvalidRequest: "INVALID_ARG",
    IdsOutside: "INVALID_ARG",
    ServerUnavailable: "UNAVAILABLE",
    HostUnavailable: "UNAVAILABLE",
    ModelNotFound: "NOT_FOUND",
    RequestCancelled: "CANCELLED",
}
# How long a router's hosts are waited for when it is loaded, in seconds: they may start at the same time.
_HOSTS_PATIENCE_S = 30.0
# How often a router looks which replicas of its hosts are there, in seconds.
_REPLICAS_PERIOD_S = 5.0


class TritonPythonModel:
    """One model instance: an engine that answers what Triton's dynamic batcher hands over."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the version's bundle and warm it up.

        Raises:
            TritonModelException: the bundle or a setting cannot be used. The message is one line, without a trace.
        """
        # A TBE call on CPU runs on one thread; torch's pool for the rest would only take cores from other instances.
        # The setting `threads` is for threads that call it at once.
        torch.set_num_threads(1)
        # Triton ignores SIGCHLD, because it does not wait for its models' processes. Inherited, that would hide from
        # this process how its children end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        freed_memory = FreedMemory()
        self._is_busy = busy_byte()
        try:
            self._engine, self._answerer, self._publisher = _load(args, freed_memory)
        except ServingError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._pauses = Pauses()
        self._pauses.start()

    def finalize(self) -> None:
        """Publish the last counts, and let the weights go."""
        self._pauses.stop()
        self._publisher.stop()
        self._engine.close()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a handover: each request with its outputs [1, B, …], or its own error."""
        self._is_busy[0] = 1
        try:
            self._pauses.check()
            responses = [_response(outcome) for outcome in self._answerer.answer(requests, _decode, _is_cancelled)]
            self._pauses.check()
            return responses
        finally:
            self._is_busy[0] = 0


def _load(args: Mapping[str, str], freed_memory: FreedMemory) -> tuple[Engine, Answerer, Publisher]:
    model = Path(args["model_repository"])
    config = json.loads(args["model_config"])
    # JSON may have left an empty string out.
    parameters = {key: value.get("string_value", "") for key, value in config["parameters"].items()}
    settings = ServingSettings(**parsed(parameters))
    bundle = open_bundle(model / args["model_version"], TrustedKeys.of_environment())
    if settings.score_threads is not None:
        torch.set_num_threads(settings.score_threads)
    recovered = parameters.get(RECOVERED)
    is_verified = recovered is not None and not weights_changed_since(bundle, float(recovered))
    # A model that is loaded again serves even if hosts are lost: requests that need no lost host are answered.
    patience_s = _HOSTS_PATIENCE_S if recovered is None else None
    memory = WeightsMemory(settings.weights_memory)
    instances = sum(group["count"] for group in config["instance_group"])
    engine = Engine(
        bundle, hosts_of(settings), patience_s, threads=settings.threads, memory=memory, processes=instances
    )
    # Every instance verifies. Where one fails and another does not, Triton 2.51 may hang and lose the version that
    # serves.
    if settings.verify_weights and not is_verified:
        verify_digests(bundle, but=bundle.manifest.weights_files)
        engine.table_files.verify()

    def warns(event: str) -> Callable[[str], None]:
        return about_model(pb_utils.Logger.log_warn, event, args["model_name"], args["model_version"])

    def says(event: str) -> Callable[[str], None]:
        return about_model(pb_utils.Logger.log_info, event, args["model_name"], args["model_version"])

    _log_lookup_program(engine.lookup_program, says("lookup_program"), warns("lookup_program"))
    if engine.dense_part is not None:
        _log_dense_part(engine.dense_part, says("dense_part"), warns("dense_part"))
    _warm_up(engine, model, warns("warm_up"))
    manifest = bundle.manifest
    families, labels = triton_families(pb_utils), {"model": args["model_name"], "version": args["model_version"]}
    metrics = _lookup_metrics(families, labels, engine, warns("slow_kernels"))
    pages = PageMetrics(families, labels, engine.table_files, warns("pages"))
    if recovered is not None and args["model_instance_name"].endswith("_0"):  # by one instance of several
        metrics.count_recovery()
    recorder = Recorder.of(settings, args["model_name"], metrics.count_captured, warns("capture"))
    fails = about_model(pb_utils.Logger.log_error, "failed", args["model_name"], args["model_version"])
    spans = Spans.of_environment(args["model_name"], args["model_version"])
    refused, shed = Sampled(warns("refused")), Sampled(warns("shed"))
    answerer = Answerer(engine, settings, metrics, recorder, fails, refused, spans=spans, say_shed=shed)
    published, ended = [metrics.publish, pages.publish, freed_memory.give_back], []
    if spans is not None:
        ended.append(spans.close)
    if manifest.hosts:
        engine.ranks.watch_replicas(_REPLICAS_PERIOD_S)
        hosts = HostMetrics(families, labels, engine.ranks)
        published.append(hosts.publish)
        ended.append(hosts.end)
    return engine, answerer, Publisher(published, ended)


def _lookup_metrics(
    families: Families, labels: Mapping[str, str], engine: Engine, warn: Callable[[str], None]
) -> LookupMetrics:
    """The metrics of an instance. `warn` gets a line if FBGEMM does not use the processor's vector instructions."""
    kernels = instruction_set()
    advice = slow_kernels(kernels)
    if advice is not None:
        warn(advice)
    manifest, dense_part = engine.bundle.manifest, engine.dense_part
    outputs = () if manifest.dense_part is None else manifest.dense_part.outputs
    return LookupMetrics(
        families,
        labels,
        [table.name for table in manifest.tables],
        manifest.exported_at,
        {output.name: output.parity.scale for output in outputs},
        kernels=kernels,
        has_slow_kernels=advice is not None,
        programs={
            "lookup": engine.lookup_program.form.value,
            "scores": "" if dense_part is None else dense_part.file.format.value.lower(),
        },
    )


def _log_lookup_program(loaded: LoadedProgram, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Say how rows are looked up, and why `program.pt` is not used."""
    if loaded.failure is not None:
        warn(loaded.failure)
    source = PROGRAM if loaded.form is ProgramForm.TORCHSCRIPT else "a module built from the manifest"
    say(f"rows are looked up by {source}, {loaded.form.value}")


def _log_dense_part(dense_part: LoadedDensePart, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Log which file makes scores, and which faster ones could not be loaded."""
    for failure in dense_part.failures:
        warn(failure)
    say(f"scores are made by {dense_part.file.name}, {dense_part.file.format.value}")


def _warm_up(engine: Engine, model: Path, warn: Callable[[str], None]) -> None:
    """Answer every request in `model`/warm_up.jsonl, if there is such a file. Requests that are refused, or need a
    host that does not answer, are skipped. So are lines that are no requests: `warn` gets a line that says so.

    Raises:
        ConfigurationError: the file cannot be read, or no line is a captured request.
    """
    path = model / WARM_UP
    if not os.path.lexists(path):
        return
    skipped = SkippedLines()
    for captured in read_captured(path, skipped):
        with suppress(InvalidRequest, HostUnavailable):  # it may have been captured for being refused
            engine.outputs(_with_weights(captured.tensors, engine.schema.weighted))
    for line in skipped.report(path):
        warn(line)


def _with_weights(tensors: Tensors, weighted: bool) -> Tensors:
    """A captured request as a model takes it: with a weight of 1 for each id, float32 [N], if it is weighted."""
    weights = np.ones(tensors.values.size, np.float32) if weighted else None
    return replace(tensors, weights=weights)


def _is_cancelled(request: Any) -> bool:
    """Whether the caller cancelled, or its deadline passed."""
    cancelled: bool = request.is_cancelled()
    return cancelled


def _decode(request: Any) -> Tensors:
    """The tensors of one of Triton's requests.

    Raises:
        InvalidRequest: an input is missing or not [1, n], or a parameter is of another type.
    """
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    weights = inputs.get("weights")
    parameters = decode_parameters(request.parameters())
    return Tensors(
        features=parameters.pop("features", None),
        values=_row("values", inputs.get("values")),
        lengths=_row("lengths", inputs.get("lengths")),
        weights=None if weights is None else _row("weights", weights),
        outputs=request.requested_output_names(),
        dense={name: _samples(name, input_) for name, input_ in inputs.items() if name not in ID_INPUTS},
        **parameters,
    )


def _row(name: str, tensor: Any) -> Array:
    """The row [n] of an input [1, n]."""
    if tensor is None:  # Triton counts inputs, and takes a dense one in place of this
        raise InvalidRequest(f"{name}: expected shape [1, n], got none", Reason.SHAPE)
    array = to_array(tensor)
    if array.ndim != 2 or array.shape[0] != 1:
        raise InvalidRequest(f"{name}: expected shape [1, n], got {list(array.shape)}", Reason.SHAPE)
    row: Array = array[0]
    return row


def _samples(name: str, tensor: Any) -> Array:
    """The samples [B, …] of an input [1, B, …]."""
    array = to_array(tensor)
    if array.ndim < 2 or array.shape[0] != 1:
        raise InvalidRequest(f"{name}: expected shape [1, B, …], got {list(array.shape)}", Reason.DENSE)
    samples: Array = array[0]
    return samples


def _response(outcome: Outcome) -> Any:
    if isinstance(outcome, ServingError):
        status = getattr(pb_utils.TritonError, _STATUS.get(type(outcome), "INTERNAL"))
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(shown(str(outcome)), status))
    outputs = [to_tensor(pb_utils.Tensor.from_dlpack, name, array) for name, array in outcome.items()]
    return pb_utils.InferenceResponse(outputs)
