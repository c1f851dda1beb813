"""What docs/protocol.md says of a message, worked out from its bytes in plain numpy. Shares no code with the server."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tritonclient.grpc import service_pb2 as pb

from tests.fuzz.answers import Answer, Bags, Doubles, Feature, answer_lookup, bags_of, embeddings_of

_IDS = {"values": ("INT64", np.int64), "lengths": ("INT32", np.int32)}
# Dense numbers beyond this may leave the range of FP32 on their way.
_MODERATE = 1e6

_DTYPES: dict[str, Any] = {
    "FP32": np.float32,
    "INT64": np.int64,
    "INT32": np.int32,
    "INT16": np.int16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "BOOL": np.bool_,
}


class Dense(NamedTuple):
    """A dense input: its dtype, and the shape of a sample; or of an id of a key."""

    datatype: str
    shape: tuple[int, ...]
    key: str | None = None

    @property
    def dtype(self) -> Any:
        """The same of numpy."""
        return _DTYPES[self.datatype]


@dataclass(frozen=True)
class Scores:
    """What a model makes of its embeddings.

    Attributes:
        dense: the dense inputs.
        names: of the outputs.
        of: the outputs, from embeddings [B, D] in the default order, dense inputs [B, …], and what is looked up.
        jagged: what it takes of ids: (kind, feature) each.
        fixed: features with exactly so many ids in each bag.
        together: features with as many ids in each sample.
    """

    dense: Mapping[str, Dense]
    names: tuple[str, ...]
    of: Callable[[Doubles, Mapping[str, npt.NDArray[Any]], Bags], Answer]
    jagged: tuple[tuple[str, str], ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    together: tuple[str, ...] = ()

    def jagged_bytes(self, bags: Bags) -> int:
        """Of what it takes of ids, rows as FP32."""
        total = 0
        for kind, name in self.jagged:
            if kind == "NUMBERS":
                of = self.dense[name]
                key, item_bytes = str(of.key), np.dtype(of.dtype).itemsize * int(np.prod(of.shape))
            else:
                key, item_bytes = (
                    name,
                    {"LENGTHS": 4, "IDS": 8, "ROWS": 4 * bags.features[name].numbers.shape[1]}[kind],
                )
            size = len(bags.lengths[key]) if kind == "LENGTHS" else len(bags.ids[key])
            total += size * item_bytes * (bags.samples if key in bags.shared else 1)
        return total

    def has_right_lengths(self, bags: Bags) -> bool:
        """Whether the bags have as many ids as scores need."""
        if any((bags.lengths[name] != length).any() for name, length in self.fixed.items()):
            return False
        lengths = np.broadcast_arrays(*(bags.lengths[name] for name in self.together)) if self.together else ()
        return all((one == other).all() for one, other in pairwise(lengths))

    def has_right_dense(self, dense: Mapping[str, npt.NDArray[Any]], shared: Sequence[str], bags: Bags) -> bool:
        """Whether dense inputs have as many rows as scores need."""
        for name, numbers in dense.items():
            key = self.dense[name].key
            if key is not None and (name in shared or len(numbers) != len(bags.ids[key])):
                return False
            if key is None and len(numbers) != (1 if name in shared else bags.samples):
                return False
        return True


@dataclass(frozen=True)
class Model:
    """What is served."""

    name: str
    version: str
    features: Mapping[str, Feature]
    most_ids: int
    most_samples: int
    most_sequence_bytes: int
    scores: Scores | None = None

    @property
    def tables(self) -> dict[str, Feature]:
        """Each table, as a sequence of its rows."""
        return {feature.table: replace(feature, is_sequence=True) for feature in self.features.values()}

    @property
    def dense(self) -> Mapping[str, Dense]:
        """The dense inputs, by name."""
        return {} if self.scores is None else self.scores.dense

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of all of its outputs."""
        return ("embeddings", "sequences", "once", *(() if self.scores is None else self.scores.names))


@dataclass(frozen=True)
class Verdict:
    """What a server has to do: answer so (`must` or may), or refuse (no answer)."""

    answer: Answer | None
    must: bool = True


REFUSE = Verdict(None)


def judge(models: Sequence[Model], message: bytes) -> Verdict:
    """What docs/protocol.md says of a serialized ModelInferRequest."""
    try:
        request = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return REFUSE
    # Triton reads names as C does, up to a zero.
    model = next((model for model in models if model.name == request.model_name.partition("\0")[0]), None)
    if model is None or not _is_version(model, request.model_version):
        return REFUSE
    arrays = _arrays(model, request)
    features = _features_of(model, request)
    if arrays is None or features is None:
        return REFUSE
    is_rows = "tables" in request.parameters
    outputs = {output.name for output in request.outputs} or {*model.outputs}
    if is_rows and "sequences" not in outputs:
        return REFUSE
    values, lengths, dense = arrays.pop("values"), arrays.pop("lengths"), arrays
    shared = _shared_names(model, request, features)
    if shared is None:
        return REFUSE
    rows = [len(numbers) for name, numbers in dense.items() if name not in shared and model.dense[name].key is None]
    bags = bags_of(features, values, lengths, shared, rows[0] if rows else 1)
    if bags is None or values.size > model.most_ids or bags.samples > model.most_samples:
        return REFUSE
    sequence_bytes = bags.sequence_bytes if "sequences" in outputs else 0
    if sequence_bytes > model.most_sequence_bytes:
        return REFUSE
    is_shared = any(not value.is_sequence for name, value in features.items() if name in shared)
    if is_shared and "embeddings" in outputs and "once" not in outputs:
        return REFUSE
    must = _is_plain(request, model)
    answer = dict(answer_lookup(bags, outputs))
    if model.scores is not None and outputs & {*model.scores.names} and not is_rows:
        if features.keys() < model.features.keys() or dense.keys() < model.dense.keys():
            return REFUSE
        if not model.scores.has_right_dense(dense, shared, bags) or not model.scores.has_right_lengths(bags):
            return REFUSE
        if sequence_bytes + model.scores.jagged_bytes(bags) > model.most_sequence_bytes:
            return REFUSE
        if any(numbers.dtype == np.bool_ and (numbers.view(np.uint8) > 1).any() for numbers in dense.values()):
            return REFUSE
        bags = bags.in_order(list(model.features))
        answer |= answer_lookup(bags, outputs)  # in the default order beside scores
        with np.errstate(invalid="ignore"):  # bytes at random may be a NaN that signals
            doubles = {
                name: numbers.astype(np.float64) if numbers.dtype == np.float32 else numbers
                for name, numbers in dense.items()
            }
        doubles = {
            name: np.broadcast_to(value, (bags.samples, *value.shape[1:])) if model.dense[name].key is None else value
            for name, value in doubles.items()
        }
        scores = model.scores.of(embeddings_of(bags), doubles, bags)
        answer |= {name: numbers for name, numbers in scores.items() if name in outputs}
        floats = [numbers for numbers in dense.values() if numbers.dtype == np.float32]
        must &= not any((np.abs(numbers[np.isfinite(numbers)]) > _MODERATE).any() for numbers in floats)
    else:  # dense inputs that nobody needs: whether they are looked at is not said
        is_plain = all(len(numbers) == bags.samples and not model.dense[name].key for name, numbers in dense.items())
        must &= not dense or (not is_rows and not shared and is_plain)
    return Verdict(answer, must=must)


def _arrays(model: Model, request: Any) -> dict[str, npt.NDArray[Any]] | None:
    """The inputs by name: `values` [N], `lengths` [F·B], and of the dense ones those that are there, [B, …]. None
    where they are not right.
    """
    names = [tensor.name for tensor in request.inputs]
    if len({*names}) < len(names) or not _IDS.keys() <= {*names} <= _IDS.keys() | model.dense.keys():
        return None
    if len(request.raw_input_contents) < len(names):
        return None
    arrays = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=False):
        dense = model.dense.get(tensor.name)
        datatype, dtype = _IDS[tensor.name] if dense is None else (dense.datatype, dense.dtype)
        inner, shape = tensor.shape[1:], () if dense is None else dense.shape
        is_shape = len(inner) == 1 + len(shape) and (*inner[1:],) == shape
        if tensor.datatype != datatype or tensor.shape[:1] != [1] or not is_shape or inner[0] < 0:
            return None
        size = int(np.prod([int(size_of_dim) for size_of_dim in inner], dtype=object))
        if size * np.dtype(dtype).itemsize != len(raw):
            return None
        arrays[tensor.name] = np.frombuffer(raw, dtype).reshape(inner)
    return arrays


def _features_of(model: Model, request: Any) -> dict[str, Feature] | None:
    """The features, or tables, that are asked for, in their order; None where the parameters are not right."""
    there = [name for name in ("features", "tables") if name in request.parameters]
    if not there:
        return dict(model.features)
    parameter = request.parameters[there[0]]
    if len(there) > 1 or parameter.WhichOneof("parameter_choice") != "string_param":
        return None
    available = model.features if there[0] == "features" else model.tables
    names = parameter.string_param.split(",")
    if len({*names}) < len(names) or not {*names} <= available.keys():
        return None
    return {name: available[name] for name in names}


def _shared_names(model: Model, request: Any, features: Mapping[str, Feature]) -> Sequence[str] | None:
    """What comes once; None where the parameter is not right."""
    if "once" not in request.parameters:
        return ()
    parameter = request.parameters["once"]
    if parameter.WhichOneof("parameter_choice") != "string_param":
        return None
    text = parameter.string_param.partition("\0")[0]  # as Triton reads it
    shared = text.split(",") if text else []
    if shared and "tables" in request.parameters:
        return None
    return shared if len({*shared}) == len(shared) and {*shared} <= {*features, *model.dense} else None


def _is_version(model: Model, text: str) -> bool:
    """Triton reads a number and lets what is around it be, as strtoll(3) does."""
    match = re.match(r"\s*\+?0*([0-9]+)", text)
    return not text or (match is not None and match[1] == model.version)


def _is_plain(request: Any, model: Model) -> bool:
    """Whether it says nothing that Triton itself may take exception to, or let pass."""
    if request.model_name != model.name or request.model_version not in ("", model.version):
        return False
    # An entry of a map with a field that nobody knows is an entry without a value to Triton, and none at all to Python.
    if any(len(UnknownFieldSet(message)) for message in (request, *request.inputs, *request.outputs)):
        return False
    if len(request.raw_input_contents) != len(request.inputs):
        return False
    if [key for key in request.parameters if key not in ("features", "tables", "once")]:
        return False
    if any(tensor.parameters for tensor in request.inputs) or any(
        tensor.HasField("contents") for tensor in request.inputs
    ):
        return False
    names = [output.name for output in request.outputs]
    return (
        {*names} <= {*model.outputs}
        and len({*names}) == len(names)
        and not any(output.parameters for output in request.outputs)
    )
