"""docs/kubernetes.md names the options that there are, with their defaults."""

import re
from pathlib import Path
from typing import Any

import typer

from export.__main__ import app

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"


def test_the_page_lists_all_options_with_their_defaults() -> None:
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = {option: default for cell, default in rows for option in re.findall(r"--[a-z-]+", cell)}
    command: Any = typer.main.get_command(app)
    options = {
        param.opts[0]: param for param in command.commands["manifests"].params if param.opts[0].startswith("--")
    }
    assert named.keys() == options.keys()
    for option in ("--routers", "--most-routers"):
        assert str(options[option].default) in named[option].split(", ")
    assert named["--replicas"] == str(options["--replicas"].default)
    assert named["--metrics-from"] == f"`{options['--metrics-from'].default}`"
    assert {option for option, param in options.items() if param.required} == {
        option for option, default in named.items() if default == "required"
    }
