"""Lookup requests as arrays, on both sides of the wire. No torch, no Triton.

::

    client    lists, arrays, KJT ─ encoding.encode ─► Tensors ─ gRPC ─►
    server    Tensors ─ accept ─► KjtRequest ─ kjt.check_each ─► Checked ─ batches_of ─► Batch
              Batch ─ the ranks ─► [B, D] ─ outputs_of ─► outputs by name ─ gRPC ─►
    client    outputs ─ encoding.decode ─► {feature: [B, dim]}

`serving.engine.answer` is the way of the server, from KjtRequest on, for requests that are answered together.
"""
