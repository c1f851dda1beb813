"""Peer: MLServer with a runtime of its own, on KServe's gRPC protocol."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from model import Model


class Lookup(MLModel):
    """What `mlserver start` loads."""

    async def load(self) -> bool:
        self.model = Model.from_environment()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        arrays = {input_.name: NumpyCodec.decode_input(input_) for input_ in payload.inputs}
        output = NumpyCodec.encode_output(name=self.model.output, payload=self.model(**arrays))
        return InferenceResponse(model_name=self.name, outputs=[output])
