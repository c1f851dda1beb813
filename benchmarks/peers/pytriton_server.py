"""Peer: PyTriton, with its decorator that joins waiting requests."""

import numpy as np
from model import Model
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

model, port = Model.from_arguments()


@batch
def infer(**arrays):
    return {model.output: model(**arrays)}


config = TritonConfig(grpc_port=port, http_port=port + 1, metrics_port=port + 2, http_address="127.0.0.1")
with Triton(config=config) as triton:
    triton.bind(
        model_name="tables",
        infer_func=infer,
        inputs=[Tensor(name=name, dtype=dtype, shape=(width,)) for name, (dtype, width) in model.inputs.items()],
        outputs=[Tensor(name=model.output, dtype=np.float32, shape=(model.width,))],
        config=ModelConfig(max_batch_size=1024, batcher=DynamicBatcher()),
    )
    triton.serve()
