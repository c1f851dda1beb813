"""A trained module: its tables, and where their rows are."""
