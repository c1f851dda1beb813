"""Where partial sums come from: this process, or hosts that are asked over KServe gRPC.

::

    engine ─► here      all ranks in this process
         └──► routed ── split ─┬─► rank 0: this process ────────────────┬─ merge ─► embeddings
                               └─► direct ─► host ─► a host's Triton ───┘
"""
