"""Follow the forward of a model, its collections as single steps. What cannot be followed is refused by its line."""

from collections.abc import Collection

from torch import fx, nn

from export.errors import ModelError, first_line
from export.quiet import quiet
from export.trained.keyed import KeyedTracer
from export.trained.lines import line_of_error
from export.trained.modules import evaluating

WAY_OUT = "give export_model(dense=…), a module of your own that takes pooled embeddings, or export without --scores"


def traced(entry: nn.Module, collections: Collection[nn.Module]) -> fx.GraphModule:
    """The whole forward of `entry` as a graph. Its modules are those of `entry`.

    Args:
        entry: the model.
        collections: each call of one is a node.

    Raises:
        ModelError: naming the line of the model's code that cannot be followed.
    """
    with evaluating(entry), quiet():
        try:
            return fx.GraphModule(entry, _Tracer(collections).trace(entry), type(entry).__name__)
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"{type(entry).__name__}: its forward cannot be followed{line_of_error(error)}: "
                f"{first_line(error)}: {WAY_OUT}"
            ) from error


class _Tracer(KeyedTracer):
    record_stack_traces = True

    def __init__(self, collections: Collection[nn.Module]) -> None:
        super().__init__()
        self._collections = collections

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._collections or super().is_leaf_module(m, module_qualified_name)
