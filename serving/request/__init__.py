"""Lookup requests as arrays, on both sides of the wire. No torch, no Triton.

::

    client    lists, arrays, KJT ─ encoding.encode ─► Tensors ─ gRPC ─►
    server    Tensors ─ kjt: accept, check, merge ─► Batch ─ TBE ─ kjt.split ─► [B, D] ─ gRPC ─►
    client    [B, D] ─ encoding.decode ─► {feature: [B, dim]}
"""
