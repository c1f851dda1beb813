"""A bundle's bytes in memory: mapped files and their pages, shared copies, and how much memory there is."""
