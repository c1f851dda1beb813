"""Runs of `score_files` that stop in the middle."""

from collections.abc import Callable


class Stopped(Exception):
    """As if the run were killed: what it wrote stays."""


def stop_after(rows: int) -> Callable[[int, int], None]:
    """A `progress` that stops the run when so many rows are done."""

    def progress(done: int, _: int) -> None:
        if done >= rows:
            raise Stopped

    return progress
