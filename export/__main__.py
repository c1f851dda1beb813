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
for command, purpose in (
    (model, "Export a trained model as a bundle."),
    (publish_router, "Publish a router's bundle after those of its hosts."),
    (plan, "Show how tables would be sharded; write no bundle."),
    (inspect, "Show a bundle."),
    (verify, "Check the files, rows and answers of a bundle."),
    (compare, "Measure shardings and dtypes; write a report."),
    (push, "Upload a model to an object store."),
    (release, "Set the versions that servers serve."),
    (prune, "Remove old versions and their deltas."),
    (delta, "Publish changed rows of a served model."),
    (squash, "Publish several deltas as one."),
    (compact, "Publish a version with its deltas as the next version."),
    (manifests, "Write Kubernetes manifests for a bundle."),
):
    app.command(cls=_Command, short_help=purpose)(command)

if __name__ == "__main__":
    app()
