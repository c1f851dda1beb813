"""Random forwards that are read as keeping samples apart keep them apart."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from export.batchability.probe_mixing import probe_mixing
from serving.bundle.scores import DenseDtype
from tests.export.batchability.test_find_mixing import mixing_of, probe, run


class Drawn(nn.Module):
    """A few steps one behind the other, drawn by chance. Some let samples meet."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.steps = [
            str(random.choice(list(MEETING if random.random() < 0.15 else KEEPING)))
            for _ in range(random.integers(2, 7))
        ]

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        x = embeddings
        for step in self.steps:
            x = {**KEEPING, **MEETING}[step](x, dense)
        return x


KEEPING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda x, _: functional.relu(x),
    "softmax": lambda x, _: x.softmax(1),
    "tanh of cumsum": lambda x, _: torch.tanh(x.cumsum(1)),
    "dense": lambda x, d: torch.cat([x, d[:, :4]], 1),
    "halves": lambda x, _: x.view(x.size(0), 2, -1).sum(1).repeat(1, 2),
    "blocks": lambda x, _: x.view(-1, 2, x.size(1) // 2).transpose(1, 2).flatten(1),
    "flat": lambda x, _: torch.tanh(x.flatten()).view(-1, x.size(1)),
    "outer": lambda x, _: torch.bmm(x[:, :4].unsqueeze(2), x[:, :4].unsqueeze(1)).flatten(1),
    "twice": lambda x, _: torch.cat([x, x + 1], 0).view(2, -1, x.size(1)).amax(0),
    "top": lambda x, _: x.topk(4, 1).values,
    "fixed": lambda x, _: torch.tanh(torch.arange(16.0).view(4, 4) @ x[:, :4].t()).t(),
    "mask": lambda x, d: x.masked_fill(d[:, :1] > 0.5, 0.0),
    "sample's own": lambda x, d: x / d.abs().amax(1, keepdim=True).clamp(min=1),
}
MEETING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax over samples": lambda x, _: x.softmax(0),
    "centred": lambda x, _: x - x.mean(0, keepdim=True),
    "largest": lambda x, d: x / d.abs().max().clamp(min=1),
    "surge": lambda x, d: x + functional.relu(d - 5).sum(),
    "rolled": lambda x, _: x.roll(1, 0),
    "cumulated": lambda x, _: x.cumsum(0),
    "size": lambda x, _: x * (x.size(0) / 64),
    "in-batch": lambda x, _: (x @ x.t()).softmax(1) @ x,
    "aligned wrong": lambda x, d: x + (x[:, :1] * d[:, 0]).amax(1, keepdim=True),
    "turned": lambda x, _: x.t().contiguous().view(x.size(1), -1).t().flip(0),
}


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=pytest.mark.long)])
def test_random_forwards_that_are_read_as_apart_are_apart(count: int) -> None:
    """Each is also run: no number of a sample changes with another sample's, of whatever size."""
    count_apart = 0
    for seed in range(count):
        module = Drawn(seed).eval()
        mixed_by = mixing_of(module)
        assert (mixed_by is None) == (not {*module.steps} & MEETING.keys()), (module.steps, mixed_by)
        if mixed_by is None:
            count_apart += 1
            assert probe_mixing(partial(run, module, ["x"]), probe(), DenseDtype.FP32, {}) is None
    assert count // 4 <= count_apart <= 3 * count // 4
