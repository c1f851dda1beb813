"""The weights of a dense part, and their dtype."""

import copy
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from export.errors import CheckpointError, QuantizeError
from export.scores.dense_subgraph import DenseSubgraph
from export.scores.int8_linear import PackedInt8Linear, PlainInt8Linear
from export.scores.written_inputs import cast_of_input
from export.trained.checkpoint import Checkpoint
from export.trained.model_copy import copy_model
from export.trained.model_weights import replace_tensor
from export.trained.module_paths import dotted
from serving.bundle.scores import DenseDtype, DenseFormat


def with_weights(
    subgraph: DenseSubgraph, path: str, collections: Iterable[str], checkpoint: Checkpoint | None
) -> fx.GraphModule:
    """A copy of a dense subgraph on the CPU, with the weights that serve.

    Args:
        subgraph: has all weights except its collections'.
        path: of its model in the module that the caller passed.
        collections: paths of the collections. A forward may read a table of a collection directly.
        checkpoint: has the weights of the collections. None: the model has them itself.

    Raises:
        CheckpointError: a weight is missing.
    """
    module = cast(fx.GraphModule, copy_model(subgraph.module, ()).eval())
    prefixes = tuple(f"{dotted(collection)}." for collection in collections)
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        key = dotted(path, name)
        if checkpoint is not None and key.startswith(prefixes):
            replace_tensor(module, weight, checkpoint.tensor(key, weight))
        elif weight.is_meta:
            raise CheckpointError(
                f"a buffer of the dense part, {key!r}, is on the meta device, and its numbers are in no checkpoint: "
                "build the model with its tables alone on meta, as --checkpoint does"
            )
    return module.cpu()


def with_dtype(module: fx.GraphModule, dtype: DenseDtype, format_: DenseFormat) -> fx.GraphModule:
    """A dense part with weights of `dtype`. Its inputs and outputs keep their dtypes.

    Args:
        module: a dense part whose outputs end in a cast to their own dtypes.
        dtype: BF16 computes everything in bfloat16. INT8 quantizes the weights of nn.Linear, and its inputs by the
            range that they have in a batch.
        format_: what the result will be written in.

    Raises:
        QuantizeError: INT8 cannot hold a weight.
    """
    if dtype is DenseDtype.FP32:
        return module
    module = copy.deepcopy(module)
    if dtype is DenseDtype.BF16:
        return _in_bfloat16(module)
    _quantize(module, PackedInt8Linear if format_ is DenseFormat.TORCHSCRIPT else PlainInt8Linear)
    return module


def _quantize(module: nn.Module, kind: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace each nn.Linear in a module."""
    replaced: dict[nn.Module, nn.Module] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if type(layer) is not nn.Linear:
            continue
        if not torch.isfinite(layer.weight).all():
            raise QuantizeError(
                f"weights '{path}.weight': hold NaN or infinity, which INT8 does not have: find out how the "
                "training made it, or keep them in FP32: --dense-dtype fp32"
            )
        if layer not in replaced:
            replaced[layer] = kind(layer)
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, replaced[layer])


def _in_bfloat16(module: fx.GraphModule) -> fx.GraphModule:
    nodes = list(module.graph.nodes)
    if any(isinstance(node.target, torch._ops.OpOverloadPacket) for node in nodes):
        for node in nodes:  # a graph of torch.export names the dtype of each node
            node.args = map_aggregate(node.args, _bfloat16_for_float32)
            node.kwargs = map_aggregate(node.kwargs, _bfloat16_for_float32)
    else:
        _cast_inputs_to_bfloat16(module)
    module.recompile()
    return module.bfloat16()


def _bfloat16_for_float32(argument: Any) -> Any:
    return torch.bfloat16 if argument is torch.float32 else argument


def _cast_inputs_to_bfloat16(module: fx.GraphModule) -> None:
    for placeholder in [node for node in module.graph.nodes if node.op == "placeholder"]:
        cast_node = cast_of_input(placeholder)
        if cast_node is not placeholder:  # the cast of the embeddings to float32
            cast_node.target = "to"
            cast_node.args = (placeholder, torch.bfloat16)
            continue
        with module.graph.inserting_after(placeholder):
            narrow = module.graph.call_method("to", (placeholder, torch.bfloat16))
        placeholder.replace_all_uses_with(narrow, partial(operator.is_not, narrow))
