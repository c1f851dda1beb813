"""Float rows become stored rows: choose a dtype, quantize, cut into shards, write to the ranks' files."""
