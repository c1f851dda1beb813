"""Whether a dense part keeps the samples of a batch apart: read off its graph, so that requests may be merged."""
