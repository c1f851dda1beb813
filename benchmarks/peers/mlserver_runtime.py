"""Peer: MLServer with a runtime of its own, on KServe's gRPC protocol."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from tables import Tables


class Lookup(MLModel):
    """What `mlserver start` loads."""

    async def load(self) -> bool:
        self.tables = Tables.from_environment()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        ids = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output(name="embeddings", payload=self.tables(ids))
        return InferenceResponse(model_name=self.name, outputs=[output])
