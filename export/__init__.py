"""Export the embedding tables of a trained TorchRec model as a bundle that Triton serves."""

from serving.pins import check_pins

check_pins()  # first: with builds that do not agree, the imports below fail and do not say why

from export.config import ExportConfig  # noqa: E402
from export.errors import ExportError  # noqa: E402
from export.hosts.machines import complete_hosts, export_hosts  # noqa: E402
from export.pipeline import export_model  # noqa: E402
from export.plan.sharding import Sharding  # noqa: E402
from serving.bundle.hosts import IdDtype  # noqa: E402
from serving.bundle.rows import WeightDtype  # noqa: E402
from serving.bundle.scores import DenseDtype  # noqa: E402
from serving.bundle.tables import DefaultRow, IdPolicy, OutputDtype  # noqa: E402

__all__ = [
    "DefaultRow",
    "DenseDtype",
    "ExportConfig",
    "ExportError",
    "IdDtype",
    "IdPolicy",
    "OutputDtype",
    "Sharding",
    "WeightDtype",
    "complete_hosts",
    "export_hosts",
    "export_model",
]
