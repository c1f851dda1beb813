"""Peer: PyTriton, with its decorator that joins waiting requests."""

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from tables import Tables

tables, port = Tables.from_arguments()


@batch
def infer(ids):
    return {"embeddings": tables(ids)}


config = TritonConfig(grpc_port=port, http_port=port + 1, metrics_port=port + 2, http_address="127.0.0.1")
with Triton(config=config) as triton:
    triton.bind(
        model_name="tables",
        infer_func=infer,
        inputs=[Tensor(name="ids", dtype=np.int64, shape=(tables.ids,))],
        outputs=[Tensor(name="embeddings", dtype=np.float32, shape=(tables.width,))],
        config=ModelConfig(max_batch_size=1024, batcher=DynamicBatcher()),
    )
    triton.serve()
