"""Export the embedding tables of a trained TorchRec model as a bundle that Triton serves."""

from serving.pins import check_pins

check_pins()  # first: what follows dies on import, without a word of help, when the builds do not agree

from export.config import ExportConfig  # noqa: E402
from export.errors import ExportError  # noqa: E402
from export.pipeline import export_model  # noqa: E402
from export.sharding import Sharding  # noqa: E402
from serving.bundle import DefaultRow, IdPolicy, OutputDtype, WeightDtype  # noqa: E402

__all__ = [
    "DefaultRow",
    "ExportConfig",
    "ExportError",
    "IdPolicy",
    "OutputDtype",
    "Sharding",
    "WeightDtype",
    "export_model",
]
