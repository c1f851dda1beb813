"""The dtype of a dense part's weights."""

import copy
import warnings

import torch
from torch import fx, nn
from torch.ao.quantization import quantize_dynamic

from serving.bundle.scores import DenseDtype


def with_dtype(module: fx.GraphModule, dtype: DenseDtype) -> nn.Module:
    """A dense part with weights of `dtype`. It takes and returns float32 all the same.

    Args:
        module: as it was cut out. Its outputs end in `.float()`.
        dtype: BF16 does all in bfloat16; INT8 quantizes the weights of nn.Linear, and its inputs by the
            range that they have in a batch.
    """
    if dtype is DenseDtype.FP32:
        return module
    module = copy.deepcopy(module)
    if dtype is DenseDtype.INT8:
        with warnings.catch_warnings():
            # torch 2.13 still has it, and torchao, which is to follow, cannot be scripted.
            warnings.filterwarnings(
                "ignore", message="torch.ao.quantization is deprecated", category=DeprecationWarning
            )
            quantized: nn.Module = quantize_dynamic(module, {nn.Linear}, torch.qint8, inplace=True)  # type: ignore[no-untyped-call]
        return quantized
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in arguments:
        if [user.target for user in node.users] == ["float"]:  # the embeddings
            (widened,) = node.users
            widened.target, widened.args = "to", (node, torch.bfloat16)
            continue
        with module.graph.inserting_after(node):
            narrow = module.graph.call_method("to", (node, torch.bfloat16))
        node.replace_all_uses_with(narrow, lambda user, narrow=narrow: user is not narrow)
    module.recompile()
    return module.bfloat16()
