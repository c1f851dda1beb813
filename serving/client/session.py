"""The calls of a client to one model: which requests it sends, and how it checks and decodes their responses.

A session does no I/O itself: its caller passes a coroutine function that makes a call. Both clients share it.
AsyncLookupClient's function awaits the event loop; LookupClient's blocks and never awaits.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serving.bundle.scores import SCORE_DTYPES
from serving.bundle.tensor_names import EMBEDDINGS, SEQUENCES, SHARED
from serving.client.messages import Answer, Scores, infer_request
from serving.client.model_info import ModelInfo, info_of
from serving.errors import ConfigurationError, InternalError, InvalidRequest, Reason
from serving.files import is_utf8
from serving.protocol.messages import ModelConfigRequest
from serving.requests.answers import JaggedRows, decode, decode_rows
from serving.requests.dense_inputs import DenseFeatures, accept_dense, encode_dense, expect_all_keys
from serving.requests.encoding import Features, encode, encode_rows
from serving.requests.input_forms import Nulls
from serving.requests.layout import lengths_by_id, lengths_by_key, samples_of, shared_mask
from serving.requests.limits import RequestLimits
from serving.requests.streams import Method, features_and_dense
from serving.requests.types import Embeddings, Tensors

_PARAMETERS = {"features", "dims", "schema_digest"}

# The shape of each output, without Triton's leading 1.
Shapes = dict[str, tuple[int, ...]]


class Call(NamedTuple):
    """A method of KServe's GRPCInferenceService, and its request."""

    method: str
    request: Any


# Makes a call and returns its response, or raises the ServingError for its status.
MakeCall = Callable[[Call], Awaitable[Any]]


class Session:
    """The calls of one client to one model.

    Args:
        where: the server and the model. Error messages begin with it.
        model: the model's name.

    Raises:
        ConfigurationError: `model` is not UTF-8.
    """

    def __init__(self, where: str, model: str) -> None:
        if not is_utf8(model):
            raise ConfigurationError(f"{where}: expected a name in UTF-8")
        self._where = where
        self._model = model
        self._info: ModelInfo | None = None

    @property
    def is_known(self) -> bool:
        """Whether a server has returned the model's configuration. The server has, or had, the model."""
        return self._info is not None

    async def info(self, call: MakeCall) -> ModelInfo:
        """The model's features and dims, which are fetched once."""
        return await self._fetched_info(call) if self._info is None else self._info

    async def _fetched_info(self, call: MakeCall) -> ModelInfo:
        response = await call(Call("ModelConfig", ModelConfigRequest(name=self._model)))
        if not response.config.parameters.keys() >= _PARAMETERS:
            raise InternalError(f"{self._where} was not made by tbe-export: its config names no features")
        self._info = info_of(response.config)
        return self._info

    async def lookup(self, call: MakeCall, features: Features, **options: Any) -> Answer:
        """Embeddings of B samples, {feature: [B, dim] or JaggedRows}, float32 or float16.

        Args:
            call: makes a call.
            features: ids by feature.
            options: `nulls` of `encode`, and other fields of `Tensors`. Embeddings of features in `shared` are
                [1, dim].

        Raises:
            InvalidRequest: the model has no such feature, or the request cannot be encoded.
            InternalError: the response does not match the model's configuration.
            ServingError: as `call`.
        """
        info, tensors = await self._encoded(call, features, **options)
        return await self._lookup(call, tensors, info)

    async def _lookup(self, call: MakeCall, tensors: Tensors, info: ModelInfo) -> Answer:
        keys = tensors.features or ()
        lengths = lengths_by_key(tensors, keys)
        key_of = {name: key for key in keys for name in info.keys[key]}
        lengths_of = {name: lengths[key] for name, key in key_of.items()}
        pooled = {name: info.dims[name] for name in key_of if name not in info.sequences}
        shared = {name: dim for name, dim in pooled.items() if key_of[name] in tensors.shared}
        per_sample = {name: dim for name, dim in pooled.items() if name not in shared}
        rows = {name: (int(lengths_of[name].sum()), info.dims[name]) for name in key_of if name in info.sequences}
        samples = next((lengths_of[name].size for name in per_sample), 0)
        outputs, version = await self._infer(call, tensors, info, _shapes(samples, per_sample, shared, rows))
        embeddings: dict[str, Embeddings | JaggedRows] = {}
        if per_sample:
            embeddings |= decode(outputs[EMBEDDINGS], per_sample)
        if shared:
            embeddings |= decode(outputs[SHARED], shared)
        if rows:
            decoded = decode_rows(outputs[SEQUENCES], rows)
            embeddings |= {name: JaggedRows(values, lengths_of[name]) for name, values in decoded.items()}
        return Answer({name: embeddings[name] for name in key_of}, version)

    async def rows(self, call: MakeCall, table: str, ids: npt.ArrayLike) -> Embeddings:
        """Rows of a table, [n, dim].

        Raises:
            InvalidRequest: the model has no such table, or the ids cannot be encoded.
            InternalError: the model was exported by a version without row lookups.
            ServingError: as `call`.
        """
        info = await self.info(call)
        tensors = encode_rows(table, ids, weighted=bool(info.weighted))
        if not info.tables:
            raise InternalError(
                f"{self._where} was exported by a tbe-serving without row lookups: its config names no tables: "
                "export it under another name"
            )
        if table not in info.tables:
            raise InvalidRequest(f"table {table!r}: expected one of {', '.join(map(repr, info.tables))}")
        rows = {table: (tensors.values.size, info.tables[table])}
        outputs, _ = await self._infer(call, tensors, info, _shapes(0, {}, {}, rows))
        return decode_rows(outputs[SEQUENCES], rows)[table]

    async def score(
        self,
        call: MakeCall,
        features: Features,
        dense: DenseFeatures,
        outputs: Collection[str] | None,
        *,
        nulls: Nulls,
        **options: Any,
    ) -> Scores:
        """Scores of B samples, {output: [B, …]}, each in the dtype of its output.

        Args:
            call: makes a call.
            features: ids of all features.
            dense: dense inputs by name.
            outputs: names of the outputs to return. None: all.
            nulls: as in `encode`.
            options: other fields of `Tensors`.

        Raises:
            InvalidRequest: the model has no scores or no such output, or the request cannot be encoded.
            InternalError: the response does not match the model's configuration.
            ServingError: as `call`.
        """
        info, tensors = await self._encoded_for_scores(call, features, dense, outputs, nulls=nulls, **options)
        return await self._score(call, tensors, info)

    async def batch(
        self, call: MakeCall, batch: Any, method: Method, outputs: Collection[str] | None, nulls: Nulls
    ) -> tuple[ModelInfo, Tensors]:
        """The model, and the tensors of a batch of a stream, which may be larger than a request.

        Raises:
            ServingError: as `score` and `lookup`.
        """
        features, dense = features_and_dense(batch, method)
        if method == "lookup":
            return await self._encoded(call, features, is_limited=False, nulls=nulls)
        return await self._encoded_for_scores(call, features, dense, outputs, is_limited=False, nulls=nulls)

    async def answer(self, call: MakeCall, tensors: Tensors, info: ModelInfo, method: Method) -> Answer | Scores:
        """The answer to a request.

        Raises:
            ServingError: as `score` and `lookup`.
        """
        return await (self._lookup if method == "lookup" else self._score)(call, tensors, info)

    async def _encoded_for_scores(
        self,
        call: MakeCall,
        features: Features,
        dense: DenseFeatures,
        outputs: Collection[str] | None,
        *,
        nulls: Nulls,
        **options: Any,
    ) -> tuple[ModelInfo, Tensors]:
        info = await self.info(call)
        output_names = list(info.scores if outputs is None else outputs)
        if unknown := [name for name in output_names if name not in info.scores]:
            raise InvalidRequest(f"output {unknown[0]!r}: expected one of {', '.join(map(repr, info.scores))}")
        if not output_names:
            raise InvalidRequest(f"{self._where} has no scores: export the model with --scores")
        info, tensors = await self._encoded(call, features, nulls=nulls, **options)
        keys = tensors.features or tuple(info.keys)
        lengths = lengths_by_key(tensors, keys) if info.by_id else {}
        if info.by_id:
            expect_all_keys(info.keys, lengths)
        encoded = encode_dense(info.dense, dense, lengths, frame=features, nulls=nulls)
        return info, replace(tensors, outputs=output_names, dense=encoded)

    async def _score(self, call: MakeCall, tensors: Tensors, info: ModelInfo) -> Scores:
        keys = tensors.features or tuple(info.keys)
        lengths = lengths_by_key(tensors, keys) if info.by_id else {}
        is_shared = shared_mask(keys, [dense_input.name for dense_input in info.dense], tensors.shared)
        samples = samples_of(tensors, keys, is_shared, info.by_id)
        ids = {key: int(lengths[key].sum()) for key in info.by_id.values()}
        accept_dense(info.dense, tensors.dense, samples, tensors.shared, ids)
        response = await call(Call("ModelInfer", infer_request(self._model, tensors, info)))
        scores: dict[str, npt.NDArray[Any]] = {}
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
            key = info.by_id.get(output.name)
            rows = samples if key is None else ids[key] * (samples if key in tensors.shared else 1)
            shape = (rows, *info.scores.get(output.name, ()))
            if list(output.shape) != [1, *shape] or output.name not in tensors.outputs:
                raise self._other_model(output, shape)
            dtype = info.score_dtypes[output.name]
            if output.datatype != SCORE_DTYPES[dtype].value:
                raise InternalError(
                    f"{self._where}: expected {output.name} as {SCORE_DTYPES[dtype].value}, got {output.datatype}: "
                    "another model now has this name: make a new client"
                )
            scores[output.name] = np.frombuffer(content, dtype).reshape(shape)
        key_of = {name: info.by_id[name] for name in tensors.outputs if name in info.by_id}
        return Scores(
            {name: scores[name] for name in tensors.outputs},
            int(response.model_version),
            lengths_by_id(key_of, tensors, keys, info.by_id),
        )

    async def _encoded(
        self, call: MakeCall, features: Features, *, is_limited: bool = True, **options: Any
    ) -> tuple[ModelInfo, Tensors]:
        """The model, and the tensors of a request to it.

        Raises:
            InvalidRequest: the request is larger than the server takes, and `is_limited`.
            ServingError: as `_tensors`, and as `call`.
        """
        info = await self.info(call)
        if not is_limited:
            return info, self._tensors(info, features, None, **options)
        try:
            return info, self._tensors(info, features, info, **options)
        except InvalidRequest as error:
            if error.reason is not Reason.SIZE:
                raise
        info = await self._fetched_info(call)  # the limits may have been raised
        return info, self._tensors(info, features, info, **options)

    def _tensors(self, info: ModelInfo, features: Features, limits: RequestLimits | None, **options: Any) -> Tensors:
        """The tensors of a request within `limits`, if there are some.

        Raises:
            InvalidRequest: the model has no such feature, or the request is too large or cannot be encoded.
            InternalError: the model was exported by a version without shared features.
        """
        tensors = encode(features, info.weighted, keys=info.keys, limits=limits, **options)
        for name in tensors.features or ():
            if name not in info.keys:
                raise InvalidRequest(f"feature {name!r}: expected one of {', '.join(map(repr, info.keys))}")
        if tensors.shared and not info.takes_shared:
            raise InternalError(
                f"{self._where} was exported by a tbe-serving without shared features: its config has no output "
                f"{SHARED!r}: export it under another name, or repeat the shared features for each sample"
            )
        return tensors

    async def _infer(
        self, call: MakeCall, tensors: Tensors, info: ModelInfo, shapes: Shapes
    ) -> tuple[dict[str, Embeddings], int]:
        """Send a request. Returns its outputs in the expected `shapes`, and the model version that answered."""
        request = infer_request(self._model, replace(tensors, outputs=list(shapes)), info)
        response = await call(Call("ModelInfer", request))
        self._check_shapes(response, shapes)
        outputs = {
            output.name: np.frombuffer(content, info.output_dtype).reshape(shapes[output.name])
            for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        return outputs, int(response.model_version)

    def _check_shapes(self, response: Any, shapes: Shapes) -> None:
        for output in response.outputs:
            if list(output.shape) != [1, *shapes.get(output.name, (0,))]:
                raise self._other_model(output, shapes.get(output.name, ()))
        if len(response.outputs) != len(shapes):
            raise InternalError(f"{self._where}: expected the outputs {', '.join(shapes)}, got {response.outputs}")

    def _other_model(self, output: Any, shape: tuple[int, ...]) -> InternalError:
        return InternalError(
            f"{self._where}: expected {output.name} of shape {[1, *shape]}, got {list(output.shape)}: another model "
            "now has this name: make a new client"
        )


def _shapes(
    samples: int, pooled: Mapping[str, int], shared: Mapping[str, int], rows: Mapping[str, tuple[int, int]]
) -> Shapes:
    """The shape of each output of a lookup.

    Args:
        samples: B.
        pooled: dim of each feature pooled per sample.
        shared: dim of each feature pooled once for all samples.
        rows: shape [n, dim] of each feature that is not pooled.
    """
    shapes: Shapes = {EMBEDDINGS: (samples, sum(pooled.values()))} if pooled else {}
    shapes |= {SHARED: (1, sum(shared.values()))} if shared else {}
    return shapes | ({SEQUENCES: (sum(map(prod, rows.values())),)} if rows else {})
