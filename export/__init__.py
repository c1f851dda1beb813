"""Export the embedding tables of a trained TorchRec model as a bundle that Triton serves."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from serving.pins import check_pins, not_installed

if TYPE_CHECKING:
    from export.config import ExportConfig
    from export.errors import ExportError
    from export.machines import complete_hosts, export_hosts
    from export.next_version import compact, export_next
    from export.pipeline import export_model
    from export.plan.sharding import Sharding
    from export.publish.changes import publish_changes
    from export.publish.delta import publish_delta, squash
    from export.publish.delta_stream import stream_deltas
    from export.publish.push import staged
    from serving.bundle.formats import WeightDtype
    from serving.bundle.plan import IdDtype
    from serving.bundle.scores import DenseCompiler, DenseDtype
    from serving.bundle.tables import DefaultRow, IdPolicy, OutputDtype

__all__ = [
    "DefaultRow",
    "DenseCompiler",
    "DenseDtype",
    "ExportConfig",
    "ExportError",
    "IdDtype",
    "IdPolicy",
    "OutputDtype",
    "Sharding",
    "WeightDtype",
    "compact",
    "complete_hosts",
    "export_hosts",
    "export_model",
    "export_next",
    "publish_changes",
    "publish_delta",
    "squash",
    "staged",
    "stream_deltas",
]

# The module of each name. It is imported at its first use: torch takes seconds, and some commands do not need it.
_HOMES = {
    "DefaultRow": "serving.bundle.tables",
    "DenseCompiler": "serving.bundle.scores",
    "DenseDtype": "serving.bundle.scores",
    "ExportConfig": "export.config",
    "ExportError": "export.errors",
    "IdDtype": "serving.bundle.plan",
    "IdPolicy": "serving.bundle.tables",
    "OutputDtype": "serving.bundle.tables",
    "Sharding": "export.plan.sharding",
    "WeightDtype": "serving.bundle.formats",
    "compact": "export.next_version",
    "complete_hosts": "export.machines",
    "export_hosts": "export.machines",
    "export_model": "export.pipeline",
    "export_next": "export.next_version",
    "publish_changes": "export.publish.changes",
    "publish_delta": "export.publish.delta",
    "squash": "export.publish.delta",
    "staged": "export.publish.push",
    "stream_deltas": "export.publish.delta_stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_pins()  # first: with builds that do not match, the import fails without a reason
    try:
        globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), "export") from error
    return value
