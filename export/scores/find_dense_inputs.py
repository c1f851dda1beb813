"""Find the dense inputs of a dense subgraph, and their widths, without an example."""

from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from export.scores.dense_subgraph import DenseSubgraph
from export.trained.source_location import line_of
from serving.bundle.scores import DenseInput
from serving.errors import ConfigurationError

_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.hstack)


def find_dense_inputs(subgraph: DenseSubgraph, widths: Mapping[str, int]) -> tuple[DenseInput, ...]:
    """The dense inputs with their widths: those of `widths`, or of the nn.Linear that takes an input.

    Args:
        subgraph: takes the inputs.
        widths: by name, from the user.

    Raises:
        ConfigurationError: the width of an input is not known; or `widths` names no input, or contradicts an
            nn.Linear.
    """
    if unknown := widths.keys() - {*subgraph.input_names}:
        expected = ", ".join(map(repr, subgraph.input_names)) or "none"
        raise ConfigurationError(f"dense_widths (--dense-width) {min(unknown)!r}: expected one of {expected}")
    module = subgraph.module
    placeholders = {str(node.target): node for node in module.graph.nodes if node.op == "placeholder"}
    return tuple(
        DenseInput(name, (_width(module, placeholders[name], widths.get(name)),)) for name in subgraph.input_names
    )


def _width(module: fx.GraphModule, placeholder: fx.Node, configured: int | None) -> int:
    widths = {layer.in_features for layer in _linear_layers(module, placeholder)}
    if configured is not None:
        if not widths <= {configured}:
            line = line_of(next(iter(placeholder.users)))
            raise ConfigurationError(
                f"dense_widths (--dense-width) {placeholder.target!r}: expected {min(widths - {configured})}, of the "
                f"nn.Linear that takes it{line}, got {configured}"
            )
        return configured
    if len(widths) == 1:
        return widths.pop()
    line = "".join(line_of(user) for user in list(placeholder.users)[:1])
    raise ConfigurationError(
        f"dense input {placeholder.target!r}: its width cannot be read off an nn.Linear that takes it{line}: give "
        f"it: dense_widths = {{ {placeholder.target} = N }} in --config, --dense-width {placeholder.target}=N of "
        f"tbe-export model, or in Python dense_widths={{{str(placeholder.target)!r}: N}}"
        f"{_width_of_join(module, placeholder)}"
    )


def _width_of_join(module: fx.GraphModule, placeholder: fx.Node) -> str:
    """A hint at the width of an input that torch.cat joins with others for an nn.Linear, or ""."""
    for user in placeholder.users:
        if user.target in _JOINS:
            for layer in _linear_layers(module, user):
                width = layer.in_features
                return f": N is {width}, the width of the nn.Linear, minus the widths of what else torch.cat joins"
    return ""


def _linear_layers(module: fx.GraphModule, node: fx.Node) -> Iterator[nn.Linear]:
    """The nn.Linear layers that take what a node computes."""
    for user in node.users:
        if user.op == "call_module" and isinstance(layer := module.get_submodule(str(user.target)), nn.Linear):
            yield layer
