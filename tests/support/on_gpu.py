"""Models and batches that are on a GPU, where there is none: a tensor of `OnGpu` says that it is there, and fails beside
one of the CPU, as CUDA does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchrec import KeyedJaggedTensor

GPU = torch.device("cuda:0")


class OnGpu(Tensor):
    """A tensor of a GPU, as far as a CPU can be one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.device:
            return GPU
        if func is Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(Tensor)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not isinstance(tensor, OnGpu) and tensor.dim() for tensor in tensors):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def to_gpu(module: nn.Module) -> nn.Module:
    """`module` with its parameters and buffers there."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().as_subclass(OnGpu), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.as_subclass(OnGpu)
    return module


def sent(value: Any) -> Any:
    """An argument of a call, there."""
    if isinstance(value, KeyedJaggedTensor):
        values, lengths = value.values().as_subclass(OnGpu), value.lengths().as_subclass(OnGpu)
        return KeyedJaggedTensor(value.keys(), values, lengths=lengths)
    return value.as_subclass(OnGpu) if isinstance(value, Tensor) else value
