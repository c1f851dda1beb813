"""A plan becomes TorchScript: the lookup, without weights."""
