"""Lookup requests as arrays, on both sides of the wire. No torch, no Triton.

::

    client    lists, arrays, KJT ─ encoding.encode ─► Tensors ─ gRPC ─►
    server    Tensors ─ accept ─► KjtRequest ─ validate_each ─► ValidatedRequests ─ merge_all ─► batches
              batches ─ the ranks ─► [B, D] each ─ batches.unmerge ─► outputs by name ─ gRPC ─►
    client    outputs ─ answers.decode ─► {feature: [B, dim]}

`serving.engine.answer` does the server's part, from KjtRequest on, for requests that are answered together. Each step
processes all of them, so that the cost of a numpy call is paid once.

Letters in docstrings: R requests, S segments, F features, B samples, N ids, D columns of an answer; B_r are the
samples of request r. A segment is a feature of a request. A KJT is feature-major: all bags of the first feature, then
all bags of the second, and so on.
"""
