"""`tbe-export` as one types it."""

from typing import Any

from typer.testing import CliRunner

from export.__main__ import app as export_app

# The module that commands are given.
TRAINED = ("--model", "tests.support.models:collection")
PLAN = ("plan", *TRAINED, "--ranks", "4", "--ranks-per-host", "2")


def tbe_export(*arguments: str) -> Any:
    """In this process: importing torchrec anew takes seconds."""
    return CliRunner().invoke(export_app, arguments)
