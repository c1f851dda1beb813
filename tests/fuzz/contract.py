"""What docs/protocol.md says of a message, worked out from its bytes in plain numpy. Shares no code with the server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tritonclient.grpc import service_pb2 as pb

_DTYPES = {"values": ("INT64", np.int64), "lengths": ("INT32", np.int32), "weights": ("FP32", np.float32)}


@dataclass(frozen=True)
class Feature:
    """A table's numbers [rows, dim], how bags are pooled, and what an id outside does: error, zero, modulo, or
    a row. Or the rows of raw ids: any other reads the last row.
    """

    numbers: npt.NDArray[np.float32]
    mean: bool
    outside: str | int | Mapping[int, int]

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The ids that have rows: int64 [n]."""
        return np.array([*self.outside] if isinstance(self.outside, Mapping) else range(len(self.numbers)), np.int64)


@dataclass(frozen=True)
class Model:
    """What is served."""

    name: str
    version: str
    features: Mapping[str, Feature]
    most_ids: int
    most_samples: int


@dataclass(frozen=True)
class Verdict:
    """What a server has to do: answer so (`must` or may), or refuse (no answer)."""

    answer: npt.NDArray[np.float64] | None
    must: bool = True


REFUSE = Verdict(None)


def judge(model: Model, message: bytes) -> Verdict:
    """What docs/protocol.md says of a serialized ModelInferRequest."""
    try:
        request = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return REFUSE
    # Triton reads names as C does, up to a zero.
    if request.model_name.partition("\0")[0] != model.name or not _is_version(model, request.model_version):
        return REFUSE
    names = [each.name for each in request.inputs]
    if sorted(names) != ["lengths", "values"] or len(request.raw_input_contents) < 2:
        return REFUSE
    arrays = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=False):
        datatype, dtype = _DTYPES[tensor.name]
        size = int(np.prod([int(each) for each in tensor.shape], dtype=object)) if tensor.shape else 0
        wanted = np.dtype(dtype).itemsize
        if tensor.datatype != datatype or len(tensor.shape) != 2 or tensor.shape[0] != 1 or tensor.shape[1] < 0:
            return REFUSE
        if size * wanted != len(raw):
            return REFUSE
        arrays[tensor.name] = np.frombuffer(raw, dtype)
    asked: Sequence[str] = list(model.features)
    if "features" in request.parameters:
        if request.parameters["features"].WhichOneof("parameter_choice") != "string_param":
            return REFUSE
        asked = request.parameters["features"].string_param.split(",")
        if len(set(asked)) < len(asked) or not set(asked) <= model.features.keys():
            return REFUSE
    answer = _answer(model, asked, arrays["values"], arrays["lengths"])
    if answer is None:
        return REFUSE
    return Verdict(answer, must=_is_plain(request, model))


def _is_version(model: Model, text: str) -> bool:
    """Triton reads a number and lets what is around it be, as strtoll(3) does."""
    found = re.match(r"\s*\+?0*([0-9]+)", text)
    return not text or (found is not None and found[1] == model.version)


def _is_plain(request: Any, model: Model) -> bool:
    """Whether it says nothing that Triton itself may take exception to, or let pass."""
    if request.model_name != model.name or request.model_version not in ("", model.version):
        return False
    # An entry of a map with a field that nobody knows is an entry without a value to Triton, and none at all to Python.
    if any(len(UnknownFieldSet(each)) for each in (request, *request.inputs, *request.outputs)):
        return False
    if (
        len(request.raw_input_contents) != 2
        or [key for key in request.parameters if key != "features"]
        or len(request.outputs) > 1
    ):
        return False
    if any(each.parameters for each in request.inputs) or any(each.HasField("contents") for each in request.inputs):
        return False
    return all(each.name == "embeddings" and not each.parameters for each in request.outputs)


def _answer(
    model: Model, asked: Sequence[str], values: npt.NDArray[Any], lengths: npt.NDArray[Any]
) -> npt.NDArray[np.float64] | None:
    """The embeddings [B, D]; None where the ids or lengths are not right."""
    samples, left_over = divmod(lengths.size, len(asked))
    if left_over or (lengths < 0).any() or int(lengths.sum(dtype=object)) != values.size:
        return None
    if values.size > model.most_ids or samples > model.most_samples:
        return None
    position, parts = 0, []
    for name, bags in zip(asked, lengths.reshape(len(asked), samples), strict=True):
        feature = model.features[name]
        part = np.zeros((samples, feature.numbers.shape[1]))
        for sample, count in enumerate(bags.tolist()):
            ids = values[position : position + count]
            position += count
            if isinstance(feature.outside, Mapping):
                last = len(feature.numbers) - 1
                ids = np.array([feature.outside.get(id_, last) for id_ in ids.tolist()], np.int64)
            outside = (ids < 0) | (ids >= len(feature.numbers))
            if outside.any() and feature.outside == "error":
                return None
            if feature.outside == "modulo":
                ids = ids % len(feature.numbers)
            elif feature.outside == "zero":
                ids = ids[~outside]
            elif isinstance(feature.outside, int):
                ids = np.where(outside, feature.outside, ids)
            if ids.size:
                rows = feature.numbers[ids.astype(np.int64)].astype(np.float64)
                part[sample] = rows.mean(axis=0) if feature.mean else rows.sum(axis=0)
        parts.append(part)
    return np.concatenate(parts, axis=1)
