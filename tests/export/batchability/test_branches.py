"""Branches, loops and functions of a dense part that torch.export does not see."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from export.batchability.branches import find_branch, find_opaque_step


class Asks(nn.Module):
    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        if embeddings.size(0) == 1:
            return embeddings * 2
        return embeddings + dense[:, :1]


class Loops(nn.Module):
    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        for _ in range(embeddings.size(0)):
            embeddings = embeddings + dense[:, :1]
        return embeddings


class Decided(nn.Module):
    """Its branches and loops are the same for all numbers of samples."""

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        if embeddings.dim() == 2:
            embeddings = embeddings * 2
        for column in [0, 1]:
            embeddings = embeddings + dense[:, column].unsqueeze(1)
        return embeddings


class Counts(nn.Module):
    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        if len(str(embeddings.size(0))) == 3:
            return embeddings * 2
        return embeddings + dense[:, :1]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Counts, "a branch or loop (prim::If)"),
        (Asks, "a branch or loop (prim::If)"),
        (Loops, "a branch or loop (prim::Loop)"),
        (Decided, None),
    ],
)
def test_branches_on_the_number_of_samples_are_found(module: type[nn.Module], why: str | None) -> None:
    """torch.export takes it that there are two samples or more, and follows one branch."""
    program: Any = torch.jit.freeze(torch.jit.script(module().eval()))
    branch = find_branch(program)
    assert (branch is None) == (why is None)
    assert branch is None or branch.startswith(str(why))


def test_untraced_functions_of_a_graph_are_named() -> None:
    def unseen(x: Tensor) -> Tensor:
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(unseen, (graph.placeholder("x"),)))
    branch = find_opaque_step(fx.GraphModule(nn.Module(), graph))
    assert branch is not None
    assert "unseen, which is not traced" in branch
    assert find_opaque_step(fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))) is None
