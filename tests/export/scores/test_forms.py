"""Each form that public rankers bring runs by itself, whatever the number of samples."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedTensor

from tests.support.forms import call, example_of, forms, module_of


@pytest.mark.parametrize("name", forms())
def test_a_form_runs_by_itself(name: str) -> None:
    module = module_of(name)
    for samples in range(1, 9):
        answer = call(module, example_of(name, samples))
        tensors = [*tensors_of(answer)]
        assert tensors
        for each in tensors:
            assert not each.isnan().any()
        again = call(module_of(name), example_of(name, samples))
        torch.testing.assert_close(tensors, [*tensors_of(again)], rtol=0, atol=0)


def tensors_of(answer: Any) -> Iterator[Tensor]:
    """All tensors of an answer; of JaggedTensors and KeyedTensors their values."""
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, JaggedTensor | KeyedTensor):
        yield answer.values()
    elif isinstance(answer, dict):
        for each in answer.values():
            yield from tensors_of(each)
    elif isinstance(answer, tuple | list):
        for each in answer:
            yield from tensors_of(each)
    elif is_dataclass(answer):
        for field in fields(answer):
            yield from tensors_of(getattr(answer, field.name))
