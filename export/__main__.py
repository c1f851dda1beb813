"""The command `tbe-export`."""

from typing import Any

from export.commands.compare import compare
from export.commands.delta import compact, delta, squash
from export.commands.library_warnings import quiet_libraries
from export.commands.manifests import manifests
from export.commands.model import model, plan, publish_router
from export.commands.versions import inspect, prune, push, release, verify
from export.errors import ExportError
from serving.terminal.app import Command, new_app


class _Command(Command):
    shown_as_line = (ExportError, *Command.shown_as_line)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with quiet_libraries():
            return super().invoke(ctx)


app = new_app("tbe-export", "Export the embedding tables of a trained TorchRec model as a bundle that Triton serves.")
for command in (
    model,
    publish_router,
    plan,
    inspect,
    verify,
    compare,
    push,
    release,
    prune,
    delta,
    squash,
    compact,
    manifests,
):
    app.command(cls=_Command)(command)

if __name__ == "__main__":
    app()
