"""The standing benchmarks: ratios taken in one run, on one machine, over the same bytes."""
