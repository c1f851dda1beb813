"""Modules that are on a GPU are copied to the CPU, with what they keep there."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from export.trained.model_copy import on_cpu
from tests.support.on_gpu import GPU, OnGpu, to_gpu


class Keeps(nn.Module):
    """It has a layer twice, a buffer, a tensor and a device of its own, and what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad = False
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("absent", None)
        self.scale = torch.full((2,), 3.0)
        self.at = torch.device("cpu")
        self.lock = threading.Lock()


def test_objects_on_a_gpu_are_on_the_cpu_in_a_copy() -> None:
    module: Any = to_gpu(Keeps())
    module.second.weight = module.first.weight
    module.scale, module.at = module.scale.as_subclass(OnGpu), GPU
    result: Any = on_cpu(module)
    assert {parameter.device.type for parameter in (*result.parameters(), *result.buffers(), result.scale)} == {"cpu"}
    assert result.second.weight is result.first.weight
    assert [value.requires_grad for value in (result.first.weight, result.first.bias)] == [True, False]
    assert (result.at, result.lock) == (torch.device("cpu"), module.lock)
    assert result.scale.tolist() == [3.0, 3.0]
    assert {parameter.device for parameter in (*module.parameters(), *module.buffers(), module.scale)} == {GPU}
    assert module.at == GPU


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_without_gpu_tensors_is_not_copied(device: str) -> None:
    module = nn.Linear(2, 2, device=device)
    assert on_cpu(module) is module
