"""The command `tbe-serve`."""

import typer

from serving.commands.bench import bench
from serving.commands.configure import configure
from serving.commands.health import health
from serving.commands.load import load
from serving.commands.lookup import lookup
from serving.commands.run import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would read [id, ...] as a style
    help="Serve exported embedding tables, and look them up.",
)
for command in (run, lookup, configure, load, health, bench):
    app.command()(command)

if __name__ == "__main__":
    app()
