"""Embeddings that a forward cuts apart and joins again: scores are the same bits, without the copies."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor

from export import export_model
from export.scores.merge_columns import merge_adjacent_columns
from export.scores.written_inputs import writes_to_inputs
from serving.engine import Engine
from serving.lookup.program import load_fbgemm
from tests.support.long_cases import one_in
from tests.support.models import collection
from tests.support.scored_models import EXACT, QUERY, own_scores, random_request, trained
from tests.support.sequence_models import kjt_of

WIDTH = 12
SPLITS = (torch.split, torch.functional.split, torch.ops.aten.split_with_sizes)
JOINS = (torch.cat, torch.concat, torch.ops.aten.cat)


def random_steps(random: np.random.Generator, *, writes: bool) -> fx.GraphModule:
    """Columns taken and joined at random, by all ways that there are, neighbours more often than not."""
    graph = fx.Graph()
    pool: list[tuple[fx.Node, int]] = [(graph.call_method("float", (graph.placeholder("embeddings"),)), WIDTH)]
    for _ in range(int(random.integers(3, 12))):
        node, width = pool[random.integers(len(pool))]
        way = random.choice(["narrow", "aten", "split", "slice", "to", "cat", "cat", "twice", "write"])
        first = int(random.integers(width))
        length = int(random.integers(1, width - first + 1))
        if way in ("narrow", "aten"):
            target: Any = torch.narrow if way == "narrow" else torch.ops.aten.narrow
            start = first - width if random.random() < 0.1 else first  # counted from the end
            if way == "narrow" and random.random() < 0.3:
                narrowed = graph.call_function(target, (node,), {"dim": 1, "start": start, "length": length})
            else:
                narrowed = graph.call_function(target, (node, 1, start, length))
            pool.append((narrowed, length))
        elif way == "split":
            sizes = [size for size in (first, length, width - first - length) if size]
            target = SPLITS[random.integers(len(SPLITS))]
            if target is not torch.ops.aten.split_with_sizes and random.random() < 0.5:
                parts = graph.call_function(target, (node,), {"split_size_or_sections": sizes, "dim": 1})
            else:
                parts = graph.call_function(target, (node, sizes), {"dim": 1})
            pieces = [
                (graph.call_function(operator.getitem, (parts, number)), size) for number, size in enumerate(sizes)
            ]
            pool += pieces
            if random.random() < 0.7:
                joined = graph.call_function(torch.cat, ([piece for piece, _ in pieces],), {"dim": -1})
                pool.append((joined, width))
        elif way == "slice":
            pool.append((graph.call_function(torch.ops.aten.slice, (node, 0, 0, 2**63 - 1)), width))
        elif way == "to":
            pool.append((graph.call_function(torch.ops.aten.to, (node, torch.float32)), width))
        elif way == "cat":
            chosen = [pool[random.integers(len(pool))] for _ in range(int(random.integers(1, 4)))]
            target = JOINS[random.integers(len(JOINS))]
            if random.random() < 0.3:
                joined_part = graph.call_function(torch.cat, (), {"tensors": [part for part, _ in chosen], "dim": 1})
            else:
                joined_part = graph.call_function(target, ([part for part, _ in chosen], 1))
            pool.append((joined_part, sum(part for _, part in chosen)))
        elif way == "twice":
            pool.append((graph.call_function(operator.mul, (node, 2.0)), width))
        elif writes:
            graph.call_method("add_", (node, 1.0))
    graph.output(tuple(graph.call_method("clone", (node,)) if writes else node for node, _ in pool))
    return fx.GraphModule(nn.Module(), graph)


def joined(module: fx.GraphModule) -> int:
    """How many pieces a graph joins."""
    return sum(len(node.all_input_nodes) for node in module.graph.nodes if "cat" in str(node.target))


@pytest.mark.parametrize("writes", [False, True])
def test_removing_copies_changes_no_bit(writes: bool) -> None:
    """A dense part that writes to what it would share is left as it is: `changes_inputs` sees it."""
    random, fewer, unchanged = np.random.default_rng(0), 0, 0
    for _ in range(150):
        module = random_steps(random, writes=writes)
        light = merge_adjacent_columns(module, WIDTH)
        tensor = torch.from_numpy(random.random((3, WIDTH), np.float32))
        if writes_to_inputs(light, [tensor]):
            unchanged += 1
            continue
        fewer += joined(light) < joined(module)
        for merged, unmerged in zip(light(tensor.clone()), module(tensor.clone()), strict=True):
            assert torch.equal(merged, unmerged)
            assert merged.stride() == unmerged.stride()
    assert fewer > 15
    assert (unchanged > 15) is writes


class ByKey(nn.Module):
    """The loop over keys of TorchRec's own sparse arch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = collection(QUERY, seed=1)
        self.over = nn.Linear(56, 3)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(ids)
        answer: Tensor = self.over(self.joined([pooled[key] for key in pooled.keys()]))  # noqa: SIM118
        return answer

    def joined(self, pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces, dim=1)


class InAnotherOrder(ByKey):
    def joined(self, pieces: list[Tensor]) -> Tensor:
        return torch.cat([pieces[-1], *pieces[:-1]], dim=1)


class WritesToOne(ByKey):
    """What it joined is a copy: a piece that is changed afterwards is not joined again."""

    def joined(self, pieces: list[Tensor]) -> Tensor:
        joined = torch.cat(pieces, dim=1)
        pieces[0].add_(1)
        return joined


class WritesToAll(ByKey):
    """What it joined is a copy: the pieces are not changed."""

    def joined(self, pieces: list[Tensor]) -> Tensor:
        joined = torch.cat(pieces, dim=1)
        joined.add_(1)
        return joined + torch.cat([part * 2 for part in pieces], dim=1)


@pytest.mark.parametrize("with_example", one_in(2, [True, False]), ids=["example", "followed"])
@pytest.mark.parametrize(
    "model", one_in(2, [ByKey, InAnotherOrder, WritesToOne, WritesToAll]), ids=lambda part: part.__name__
)
def test_a_loop_over_keys_is_scored_as_the_model_does(
    tmp_path: Path, model: Callable[[], ByKey], with_example: bool
) -> None:
    module, random = trained(model()).eval(), np.random.default_rng(1)
    ids, dense = random_request(module, random, samples=5)
    bundle = export_model(module, tmp_path, "m", EXACT, example=(kjt_of(ids),) if with_example else None)
    with Engine.open(bundle) as engine:
        served = engine.score(ids, dense)
    for name, expected in own_scores(module, ids, dense).items():
        np.testing.assert_allclose(served[name], expected, rtol=0, atol=1e-6)
    load_fbgemm()
    program = str(torch.jit.load(bundle / "scores.pt").inlined_graph)  # type: ignore[no-untyped-call]
    assert "KeyedTensor" not in program
    assert ("aten::cat" in program) is (model is not ByKey)
