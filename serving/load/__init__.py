"""Lookups under load: what to ask, how to ask it, and what came of it."""
