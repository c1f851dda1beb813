"""The command `tbe-serve`."""

from serving.commands.bench import bench
from serving.commands.configure import configure
from serving.commands.load import load
from serving.commands.lookup import lookup, score
from serving.commands.pull import pull
from serving.commands.run import run
from serving.commands.score_files import score_files
from serving.commands.status import health, status
from serving.terminal.app import Command, new_app

app = new_app("tbe-serve", "Serve exported embedding tables, and look them up.")
for command in (run, pull, lookup, score, score_files, configure, load, health, status, bench):
    app.command(cls=Command)(command)

if __name__ == "__main__":
    app()
