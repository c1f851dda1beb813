"""Deltas, from publishing to a served row."""
