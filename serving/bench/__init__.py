"""Measure a served model: which requests to send, how to send them, and what came of it."""
