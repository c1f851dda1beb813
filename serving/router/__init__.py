"""The ranks of other hosts: a router asks them for partial sums, over KServe gRPC.

::

    engine ─► LocalRanks   all ranks in this process (serving.lookup)
         └──► RouterRanks ── split ─┬─► rank 0: this process ───────────────────┬─ merge ─► embeddings
                                    └─► calls ─► host ─► a host's tritonserver ─┘
"""
