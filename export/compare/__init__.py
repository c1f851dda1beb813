"""The sharding study: the same tables placed in every way, measured, and what follows from it."""
