"""Refuse what TorchScript cannot compile, naming the line of the model's code and what to write instead."""

from collections.abc import Iterator

from torch import fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from export.errors import ModelError
from export.trained.module_paths import named
from export.trained.source_location import line_of

# Methods of Tensor that TorchScript lacks, and what does the same.
_MISSING_METHODS = {"bfloat16": ".to(torch.bfloat16)", "bool": ".to(torch.bool)"}
_EXAMPLE = "or give an example of a call (example=…, --example)"


def expect_scriptable(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse a graph with a method or a layer that TorchScript cannot compile.

    Args:
        model: the model.
        graph: of its forward.

    Raises:
        ModelError: naming the line, and what to write instead.
    """
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _MISSING_METHODS:
            raise ModelError(
                f"{type(model).__name__}: its forward calls .{node.target}(){line_of(node)}: expected a method that "
                f"TorchScript has: write {_MISSING_METHODS[node.target]}, {_EXAMPLE}"
            )
        if node.op == "call_module":
            for layer, remove in _reparametrized(model, str(node.target)):
                raise ModelError(
                    f"{type(model).__name__}: its forward uses {layer}{line_of(node)}, whose weight is computed in "
                    f"each call: expected a plain weight, which TorchScript can compile: call {remove} before the "
                    f"export, {_EXAMPLE}"
                )


def _reparametrized(model: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """The layers in a module that compute a weight in each call, with the call that makes the weight plain."""
    if isinstance(model.get_submodule(path), parametrize.ParametrizationList):
        path = path.rpartition("parametrizations.")[0].removesuffix(".")  # the layer was traced, not its weight
    for name, layer in model.get_submodule(path).named_modules(prefix=path):
        if parametrize.is_parametrized(layer):
            parameter = next(iter(layer.parametrizations))
            yield named(name, layer), f"torch.nn.utils.parametrize.remove_parametrizations(layer, {parameter!r})"
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                kind = "weight" if isinstance(hook, WeightNorm) else "spectral"
                yield named(name, layer), f"torch.nn.utils.remove_{kind}_norm(layer, {hook.name!r})"
