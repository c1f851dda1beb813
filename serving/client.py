"""Look embeddings up over gRPC. The only file that imports tritonclient; needs no torch.

```python
with LookupClient("localhost:8001", "movielens") as client:
    answer = client.lookup({"genres": [[3, 5], [], [1]], "item_id": [[7], [8], [9]]})
    answer["genres"]  # [3, dim]
```
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import tritonclient.grpc as triton

from serving.encoding import Features, Tensors, decode, encode
from serving.errors import InvalidRequest, ServerFault, ServingError, from_status
from serving.kjt import Embeddings

DEFAULT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client needs to know of a served model.

    Attributes:
        dims: width of each feature's embedding, in the model's default order.
        weighted: the features whose ids carry weights.
        contract: equal for versions that answer the same features with the same dims and dtype.
    """

    dims: dict[str, int]
    weighted: tuple[str, ...]
    contract: str


class LookupClient:
    """A client of one model on one server. Safe to use from several threads; keeps one channel.

    Args:
        url: the server's gRPC address, "host:port".
        model: the model's name.
        timeout_s: deadline of each call.
    """

    def __init__(self, url: str, model: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise InvalidRequest(f"timeout_s: expected > 0, got {timeout_s}")
        self._url = url
        self._model = model
        self._timeout_s = timeout_s
        self._triton = triton.InferenceServerClient(url)
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """Features and dims, read from the model's metadata on first use.

        Raises:
            ServingError: the server cannot be reached, or the model is not one that tbe-export made.
        """
        if self._info is None:
            self._info = self._read_info()
        return self._info

    def lookup(self, features: Features) -> dict[str, Embeddings]:
        """Pooled embeddings of B samples.

        Args:
            features: ids by feature, any of the model's features in any order: a list of bags, or a pair of
                arrays (values [N_f], lengths [B]), or (values, lengths, weights [N_f]) for weighted models;
                or a torchrec KeyedJaggedTensor.

        Returns:
            {feature: [B, dim]}, float32 or float16 as the model was exported, in the order given. The arrays
            are views of one answer.

        Raises:
            InvalidRequest: the ids, lengths, weights or names cannot be answered; says which and why.
            DeadlineExceeded: no answer within `timeout_s`.
            ServerUnavailable: nobody listens at the address, or the model is not ready.
            ServingError: any other of `serving.errors`.
        """
        dims = self.info.dims
        tensors = encode(features, self.info.weighted)
        for name in tensors.features:
            if name not in dims:
                raise InvalidRequest(f"feature {name!r}: expected one of {', '.join(map(repr, dims))}")
        return decode(self._infer(tensors)[0], tensors.features, dims)

    def close(self) -> None:
        """Close the channel."""
        self._triton.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _infer(self, tensors: Tensors) -> Embeddings:
        inputs = [_input("values", "INT64", tensors.values), _input("lengths", "INT32", tensors.lengths)]
        if tensors.weights is not None:
            inputs.append(_input("weights", "FP32", tensors.weights))
        try:
            result = self._triton.infer(
                self._model,
                inputs,
                client_timeout=self._timeout_s,
                parameters={"features": ",".join(tensors.features)},
            )
        except triton.InferenceServerException as error:
            raise self._error(error) from None
        embeddings: Embeddings = result.as_numpy("embeddings")
        return embeddings

    def _read_info(self) -> ModelInfo:
        try:
            config = self._triton.get_model_config(self._model, client_timeout=self._timeout_s).config
        except triton.InferenceServerException as error:
            raise self._error(error) from None
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        if not {"features", "dims", "weighted", "contract"} <= parameters.keys():
            raise ServerFault(f"{self._url}: model {self._model!r} was not made by tbe-export: it names no features")
        names = parameters["features"].split(",")
        dims = [int(dim) for dim in parameters["dims"].split(",")]
        return ModelInfo(
            dims=dict(zip(names, dims, strict=True)),
            weighted=tuple(filter(None, parameters["weighted"].split(","))),
            contract=parameters["contract"],
        )

    def _error(self, error: Any) -> ServingError:
        # "StatusCode.UNAVAILABLE", or None for an error made by tritonclient itself.
        code = (error.status() or "StatusCode.UNKNOWN").removeprefix("StatusCode.")
        return from_status(code, f"{self._url}: model {self._model!r}: {error.message()}")


def _input(name: str, datatype: str, array: np.ndarray[Any, Any]) -> triton.InferInput:
    tensor = triton.InferInput(name, [1, array.size], datatype)
    tensor.set_data_from_numpy(array[np.newaxis])
    return tensor
