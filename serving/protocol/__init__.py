"""KServe's gRPC protocol as Triton speaks it, in a descriptor pool of its own."""
