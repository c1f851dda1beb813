"""Requests as arrays: a class for each step of their way through `serving.requests.kjt`; and their parameters."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import InvalidRequest, Reason
from serving.requests.schema import FeatureSet

# What Triton says of a request without parameters. To read it as JSON takes longer than to read an input.
_NONE = ("{}", "")
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# The inputs of a lookup. Others are dense.
IDS = ("values", "lengths", "weights")
# The output with the pooled embeddings, [B, D]; and the output with rows, a row for each id: [M], for each feature
# [n, dim], one behind the other.
EMBEDDINGS, SEQUENCES = "embeddings", "sequences"
# The output with the pooled embeddings of features that come once, [1, D].
SHARED = "once"
# The outputs of a lookup. Others are scores.
LOOKED_UP = (EMBEDDINGS, SEQUENCES, SHARED)

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
Embeddings = npt.NDArray[np.float32] | npt.NDArray[np.float16]
Array = npt.NDArray[np.generic]
# Some of the features of a request; bool [F].
Mask = npt.NDArray[np.bool_]
# Dense inputs in the manifest's order, [B, *shape] each, of their dtypes.
Dense = Sequence[Array]
# What a request is answered with, by the name of the output. Each has the samples of the request first, [B, …], but
# `sequences` does not.
Outputs = Mapping[str, npt.NDArray[Any]]


@dataclass(eq=False, slots=True)
class Tensors:
    """A request as a client sends it. Dtypes and shapes are those of a good request; a bad one may have any.

    What is no tensor travels as a parameter: see `PARAMETERS`. A new option of a lookup is a field here, a line
    there, and an argument of the clients' methods.

    Attributes:
        features: the features asked for, in the order of the answer; all features of the model where None.
        values: ids, feature-major; int64 [N].
        lengths: bag sizes, feature-major; int32 [F·B], fewer where some features come once.
        weights: a weight for each id; float32 [N]. None for models that are not weighted.
        trace: the W3C `traceparent` that came with the request.
        bundle: the digest of the bundle that has to answer, SHA-256 of its manifest.json in hex. None: any bundle.
        every_host: whether to answer only if every host of a router does, also those of which no row is needed.
        outputs: the outputs that are asked for. Those that no feature of the request is answered in are left out.
        dense: dense inputs by name; [B, *shape], of their dtypes.
        tables: instead of `features`: the tables whose rows are asked for, in the order of the answer. `values` and
            `lengths` are by table.
        shared: the features, and dense inputs, that come once and count for all samples: one bag, or [1, *shape].
        part_of: what the bundle that answers has to be a part of, as `serving.bundle.plan.Part.text`. None: of any
            plan, or of none.
    """

    features: Sequence[str] | None
    values: Array
    lengths: Array
    weights: Array | None = None
    _: KW_ONLY
    trace: str | None = None
    bundle: str | None = None
    every_host: bool = False
    outputs: Collection[str] = LOOKED_UP
    dense: Mapping[str, Array] = field(default_factory=dict)
    tables: Sequence[str] | None = None
    shared: Collection[str] = ()
    part_of: str | None = None


def _as_it_is(value: Any) -> Any:
    return value


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _trace(value: Any) -> str | None:
    """A `traceparent`; None if it is malformed, as W3C says."""
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a ModelInferRequest.

    Attributes:
        name: its name.
        kind: the type of its value.
        expected: the value in words, for messages.
        read: what the field is for a value.
        default: what the field is without it. It is not sent then.
    """

    name: str
    kind: type = str
    expected: str = ""
    read: Callable[[Any], Any] = _as_it_is
    default: Any = None


_LISTED = "comma-separated names"
# By field of `Tensors`.
PARAMETERS: Mapping[str, Parameter] = {
    "features": Parameter(name="features", expected=_LISTED, read=_names),
    "tables": Parameter(name="tables", expected=_LISTED, read=_names),
    "shared": Parameter(name="once", expected=_LISTED, read=_names, default=()),
    "bundle": Parameter(name="bundle", expected="a digest"),
    "part_of": Parameter(name="part_of", expected="a plan and a host"),
    "every_host": Parameter(name="every_host", kind=bool, expected="true or false", default=False),
    "trace": Parameter(name="traceparent", kind=object, read=_trace),
}


def decode_parameters(text: str) -> dict[str, Any]:
    """Fields of `Tensors`: those that have a parameter.

    Args:
        text: the parameters as Triton gives them, in JSON.

    Raises:
        InvalidRequest: a parameter is of another type; names it.
    """
    if text in _NONE:
        return {}
    said: Mapping[str, Any] = json.loads(text)
    found: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        value = said.get(parameter.name)
        if value is None:
            continue
        if not isinstance(value, parameter.kind):
            raise InvalidRequest(
                f"parameter {parameter.name}: expected {parameter.expected}, got {value!r}", Reason.FEATURES
            )
        found[name] = parameter.read(value)
    return found


def encode_parameters(tensors: Tensors, into: Any, but: Collection[str] = ()) -> None:
    """Add the parameters of a request to those of a ModelInferRequest.

    Args:
        tensors: the request.
        into: the message's `parameters`.
        but: fields that need not be sent.
    """
    for name, parameter in PARAMETERS.items():
        value = getattr(tensors, name)
        if value is None or (parameter.default is not None and not value) or name in but:
            continue
        if parameter.kind is bool:
            into[parameter.name].bool_param = bool(value)
        else:
            into[parameter.name].string_param = value if isinstance(value, str) else ",".join(value)


@dataclass(eq=False, slots=True)
class KjtRequest:
    """A request over F features and B samples with the right dtypes and shapes. Lengths and ids are not checked.

    Attributes:
        selection: the features, in the order of the answer.
        values: ids, feature-major; int64 [N].
        lengths: bag sizes, feature-major; int32 [bags]: B of each feature, and one of each that comes once.
        weights: a weight for each id; float32 [N]. None for models that are not weighted.
        samples: B.
        positions: the place of each id in the bag that was sent, int64 [N]; None: as the ids lie.
        dense: what its scores need beside ids; None: no scores are asked for.
        outputs: the outputs that are asked for.
        rowless: the ids of sequences that read no row, but zeros; bool [N]. None: there are none.
        shared: the features that come once; bool [F]. None: there are none.
        jagged: the jagged inputs of its scores as they were sent, in the manifest's order; None in place of rows.
        jagged_bytes: of all of them, rows as FP32, once what comes once is repeated for each sample.
    """

    feature_set: FeatureSet
    values: Ids
    lengths: Lengths
    weights: Weights | None
    samples: int
    positions: Ids | None = None
    dense: Dense | None = None
    outputs: Collection[str] = LOOKED_UP
    rowless: npt.NDArray[np.bool_] | None = None
    shared: Mask | None = None
    jagged: Sequence[Array | None] = ()
    jagged_bytes: int = 0

    @property
    def height(self) -> int:
        """The rows that it takes of the answer to a batch: B. What comes once is in the first of them."""
        return self.samples if self.shared is None else max(self.samples, 1)


@dataclass(eq=False, slots=True)
class ValidatedRequests:
    """R requests, one behind the other, whose lengths and ids are right. A segment is a feature of a request.

    Attributes:
        requests: the requests [R].
        values: their ids; int64 [N].
        weights: their weights; float32 [N], or None.
        lengths: their bag sizes; int32 [bags].
        offsets: where each bag starts in `values`, then N; int64 [bags + 1].
        bag_bounds: where the bags of each segment start in `lengths`, then their number; int64 [S + 1].
        id_bounds: where the ids of each segment start in `values`, then N; int64 [S + 1].
    """

    requests: Sequence[KjtRequest]
    values: Ids
    weights: Weights | None
    lengths: Lengths
    offsets: Ids
    bag_bounds: Ids
    id_bounds: Ids


@dataclass(eq=False, slots=True)
class Batch:
    """What one TBE call answers: R requests as one. For each feature, it has the bags of the first request, then of
    the second, and so on.

    Attributes:
        requests: the requests, in the order of their samples [R].
        selection: every feature that some request asks for.
        values: ids, feature-major; int64 [N].
        offsets: where each bag starts in `values`, then N; int64 [F·B + 1].
        weights: a weight for each id; float32 [N], or None.
        row_bounds: where bags are rows of sequences: where those of each request start among those of a feature,
            then their end; int64 [F, R + 1]. None: each request has a bag of a feature for each of its samples.
        has_pooled: whether a single request's pooled features are beside its sequences, with a bag for each sample.
        is_once: whether its features come once, so that each request has one sample.
    """

    requests: Sequence[KjtRequest]
    feature_set: FeatureSet
    values: Ids
    offsets: Ids
    weights: Weights | None
    row_bounds: Ids | None = None
    has_pooled: bool = False
    is_shared: bool = False

    @property
    def bounds(self) -> Ids:
        """Where the bags of each request start among those of each feature, then their end; int64 [F, R + 1]."""
        if self.row_bounds is not None:
            return self.row_bounds
        samples = np.cumsum([0, *(request.height for request in self.requests)])
        return np.broadcast_to(samples, (len(self.feature_set.names), samples.size))
