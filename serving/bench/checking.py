"""Compare answers with a bundle: with its rows, pooled by numpy, and with the scores of its dense part."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from serving.bench.requests import Prepared
from serving.bundle.load import Bundle
from serving.bundle.scores import DensePart, ScoreDtype
from serving.bundle.tables import OutputDtype
from serving.protocol.messages import ModelInferResponse
from serving.reference import Pooled, pool
from serving.requests.accept import accept
from serving.requests.jagged_inputs import jagged_inputs
from serving.requests.layout import lengths_by_key
from serving.requests.schema import ScoringSchema, schema_of
from serving.requests.types import Outputs, Tensors

if TYPE_CHECKING:
    from serving.lookup.dense_program import DenseProgram

# How far rounding may move scores, relative to the largest score. If requests are merged, matrix products are summed
# in another order. Each FP16 embedding is off by up to 2⁻¹¹.
_ROUNDING = {OutputDtype.FP32: 1e-5, OutputDtype.FP16: 2**-10}


# The numpy dtypes of outputs, by their KServe names.
_DTYPES = {"FP16": np.dtype(np.float16), **{dtype.value: dtype.numpy for dtype in ScoreDtype}}


class Checker:
    """Compares answers with a bundle.

    Args:
        bundle: the version that is served.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._schema = schema_of(bundle.manifest, None)  # nothing is looked up, so ids need no maps
        self._dense: DenseProgram | None = None  # opened when scores are compared: it imports torch

    def differences_of(self, request: Prepared, answer: bytes) -> list[str]:
        """The differences between an answer and the bundle, a line each; empty if the answer is right.

        Args:
            request: the request that was sent.
            answer: a serialized ModelInferResponse.

        Raises:
            BundleError, EnvironmentMismatch: the request is for scores, and the dense part cannot be loaded.
        """
        bundle, tensors = self._bundle, request.tensors
        response = ModelInferResponse.FromString(answer)
        if response.model_version != bundle.path.name:
            return [f"expected answers of version {bundle.path.name}, the bundle's, got {response.model_version}"]
        expected = pool(bundle.path, bundle.manifest, tensors)
        shapes = expected.shapes
        if isinstance(self._schema, ScoringSchema):
            part = self._schema.dense_part
            rows = {} if tensors.tables is not None else self._rows_of(part, request)
            shapes |= {output.name: [1, rows.get(output.key, 0), *output.shape] for output in part.outputs}
            shapes = {name: shape for name, shape in shapes.items() if name in tensors.outputs}
        answered = {output.name: list(output.shape) for output in response.outputs}
        if answered != shapes:
            return [f"expected outputs of shapes {shapes}, got {answered}"]
        outputs: dict[str, Any] = {
            output.name: np.frombuffer(content, _DTYPES[output.datatype]).reshape(output.shape[1:])
            for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        misses = [
            f"feature {name!r}: an answer is off by {error:.3g}"
            for name, error in expected.misses(expected.by_feature(outputs))
        ]
        return [*misses, *self._score_differences(expected, tensors, request.samples, outputs)]

    def _rows_of(self, part: DensePart, request: Prepared) -> dict[str | None, int]:
        """The number of rows of outputs: by key if there is a row for each id; under None, one for each sample."""
        lengths = lengths_by_key(request.tensors, request.tensors.features or self._schema.all_features.keys)
        rows: dict[str | None, int] = {None: request.samples}
        for key in {output.key for output in part.outputs} & lengths.keys():
            repeated = request.samples if key in request.tensors.shared else 1
            rows[key] = int(lengths[str(key)].sum()) * repeated
        return rows

    def _dense_program(self, schema: ScoringSchema) -> "DenseProgram":
        if self._dense is None:
            # Imports torch, which checking lookups does not need.
            from serving.lookup.dense_program import DenseProgram
            from serving.lookup.program import load_fbgemm

            load_fbgemm()
            self._dense = DenseProgram(self._bundle, schema)
        return self._dense

    def _score_differences(self, expected: Pooled, tensors: Tensors, samples: int, outputs: Outputs) -> Iterator[str]:
        """A line for each output whose scores are further off than rounding explains."""
        schema, manifest = self._schema, self._bundle.manifest
        # If a sum may have left the range of its dtype, the input of the dense part is unknown.
        if not isinstance(schema, ScoringSchema) or schema.scores.isdisjoint(outputs) or expected.is_unbounded:
            return
        dtype, looked_up = manifest.output_dtype.numpy, dict(zip(expected.features, expected.answers, strict=True))
        # A shared feature has one row, which all samples use.
        columns = [np.empty((samples, 0), dtype)]
        rows: dict[tuple[int, int], Any] = {}
        for position, (feature, table) in enumerate(zip(manifest.features, manifest.feature_tables, strict=True)):
            embeddings = looked_up[feature.name].astype(dtype)
            if table.is_sequence:
                rows[0, position] = embeddings
            else:
                columns.append(np.broadcast_to(embeddings, (samples, table.dim)))
        request = accept(schema, tensors)
        inputs = [*(request.dense or ()), *jagged_inputs(schema, request, rows, 0)]
        (scores,) = self._dense_program(schema).score(np.concatenate(columns, axis=1), [inputs], [samples])
        for output in schema.dense_part.outputs:
            if output.name in outputs:
                right = scores[output.name]
                if outputs[output.name].dtype != right.dtype:
                    yield f"output {output.name!r}: expected {right.dtype}, got {outputs[output.name].dtype}"
                    continue
                scale = max(
                    output.parity.scale, float(np.abs(right[np.isfinite(right)].astype(float)).max(initial=0))
                )
                allowed = _ROUNDING[manifest.output_dtype] * scale + 2 * output.parity.scripted
                error = _largest_difference(outputs[output.name], right)
                if not error <= allowed:
                    yield f"output {output.name!r}: a score is off by {error:.3g}, expected at most {allowed:.3g}"


def _largest_difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """The largest |difference|. It is NaN or infinity if one number is finite and the other is not."""
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    # As float64: booleans cannot be subtracted, and differences of integers may overflow.
    return float(np.abs(one[~is_same].astype(float) - other[~is_same].astype(float)).max(initial=0))
