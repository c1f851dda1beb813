"""The documentation as a website: `make docs` builds it from the pages of the repository."""
