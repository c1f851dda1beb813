"""How wide the dense inputs of a model are: told, or read off the layers that take them."""

from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from export.scores.cut import Cut
from export.trained.lines import line_of
from serving.bundle.scores import DenseInput
from serving.errors import ConfigurationError


def inputs_of(cut: Cut, told: Mapping[str, int]) -> tuple[DenseInput, ...]:
    """The dense inputs, with their widths.

    Args:
        cut: what takes them.
        told: widths by name. Those of other inputs are of the nn.Linear that they go into.

    Raises:
        ConfigurationError: a width is not known; or one is told that is not the nn.Linear's, or for something else.
    """
    if unknown := told.keys() - {*cut.inputs}:
        expected = ", ".join(map(repr, cut.inputs)) or "none"
        raise ConfigurationError(f"dense_widths (--dense-width) {min(unknown)!r}: expected one of {expected}")
    arguments = {str(node.target): node for node in cut.module.graph.nodes if node.op == "placeholder"}
    return tuple(DenseInput(name, _width(cut.module, arguments[name], told.get(name))) for name in cut.inputs)


def _width(module: fx.GraphModule, argument: fx.Node, told: int | None) -> int:
    widths = {layer.in_features for layer in _layers(module, argument)}
    if told is not None:
        if not widths <= {told}:
            where, expected = line_of(next(iter(argument.users))), min(widths - {told})
            raise ConfigurationError(
                f"dense_widths (--dense-width) {argument.target!r}: expected {expected}, of the nn.Linear that takes "
                f"it{where}, got {told}"
            )
        return told
    if len(widths) == 1:
        return widths.pop()
    where = "".join(line_of(user) for user in list(argument.users)[:1])
    raise ConfigurationError(
        f"dense input {argument.target!r}: its width cannot be read off an nn.Linear that takes it{where}: tell it: "
        f"--dense-width {argument.target}=N, dense_widths={{{str(argument.target)!r}: N}}{_joined(module, argument)}"
    )


def _joined(module: fx.GraphModule, argument: fx.Node) -> str:
    """What N is where torch.cat joins the input with others for an nn.Linear; "" where it does not."""
    for joined in argument.users:
        if joined.target in (torch.cat, torch.concat, torch.concatenate, torch.hstack):
            for layer in _layers(module, joined):
                return (
                    f": N is the {layer.in_features} of the nn.Linear behind torch.cat, less all else that it joins"
                )
    return ""


def _layers(module: fx.GraphModule, argument: fx.Node) -> Iterator[nn.Linear]:
    for user in argument.users:
        if user.op == "call_module" and isinstance(layer := module.get_submodule(str(user.target)), nn.Linear):
            yield layer
