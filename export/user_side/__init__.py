"""The second program of a dense part, for many items of one user: what only depends on the user is computed once."""
