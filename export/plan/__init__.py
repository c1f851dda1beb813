"""Plans: where the shards of quantized tables go, by TorchRec's planner."""
