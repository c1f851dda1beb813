"""The rewritten graph of a plain module: its answers, and what it computes for each item."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.user_side.once_per_user import OncePerUser, UserInputs, once_per_user

USER, ITEM, ITEMS = 24, 8, 50


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(USER, 16), nn.ReLU(), nn.Linear(16, 4))
        self.item = nn.Linear(ITEM, 4)

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = embeddings[:, :USER], embeddings[:, USER:]
        answer: Tensor = (self.user(user) * self.item(item)).sum(dim=1)
        return answer


class Layers(nn.Module):
    """A multilayer perceptron over all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(USER + ITEM, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, embeddings: Tensor) -> Tensor:
        answer: Tensor = self.layers(embeddings)
        return answer


class CrossLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = USER + ITEM
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, width) for _ in range(3))
        self.over = nn.Linear(width, 4)

    def forward(self, embeddings: Tensor) -> Tensor:
        crossed = embeddings
        for down, up in zip(self.down, self.up, strict=True):
            crossed = embeddings * up(down(crossed)) + crossed
        answer: Tensor = self.over(crossed)
        return answer


class CrossedItems(nn.Module):
    """Low-rank cross layers over an item, a user, and the item's numbers; two heads take them."""

    def __init__(self) -> None:
        super().__init__()
        width = USER + 2 * ITEM
        self.numbers = nn.Linear(ITEM, ITEM)
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=bool(number)) for number in range(2))
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))

    def forward(self, embeddings: Tensor) -> Tensor:
        numbers = self.numbers(embeddings[:, USER:]).relu()
        crossed = start = torch.cat([numbers, embeddings], dim=1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = start * up(down(crossed)) + crossed
        return torch.cat([head(crossed) for head in self.heads], dim=1)


class Din(nn.Module):
    """Attention of an item, the last columns, over a history of 3 events, the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(4 * ITEM, 4), nn.Sigmoid(), nn.Linear(4, 1))

    def forward(self, embeddings: Tensor) -> Tensor:
        history, item = embeddings[:, :USER].reshape(-1, 3, ITEM), embeddings[:, USER:]
        items = item.unsqueeze(1).expand(-1, 3, -1)
        weights = self.weigh(torch.cat([items, history, items - history, items * history], dim=2))
        answer: Tensor = (weights * history).sum(dim=1)
        return answer


class Unknown(nn.Module):
    """An operator without a rule meets the user's columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(USER + ITEM)

    def forward(self, embeddings: Tensor) -> Tensor:
        answer: Tensor = self.norm(embeddings).cumsum(dim=1)
        return answer


def rewritten(module: nn.Module) -> OncePerUser:
    example = torch.randn(7, USER + ITEM)
    dims = {"embeddings": {0: torch.export.Dim("samples", min=2)}}
    exported = torch.export.export(module.eval(), (example,), dynamic_shapes=dims, strict=False)
    graph = exported.run_decompositions({}).module(check_guards=False)
    assert isinstance(graph, fx.GraphModule)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return once_per_user(graph, placeholders, UserInputs(((0, USER),), frozenset()))


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, the largest number of columns that an operator writes for each item."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.columns = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        is_new = isinstance(answer, Tensor) and not any(alias.alias_info for alias in func._schema.returns)
        if is_new and answer.dim() and answer.shape[0] == ITEMS:
            self.columns = max(self.columns, answer.numel() // ITEMS)
        return answer


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        pytest.param(Towers, 1, id="towers"),
        pytest.param(Layers, 4, id="a perceptron"),
        pytest.param(CrossLayers, ITEM + 6, id="cross layers"),
        pytest.param(Din, 3 * 4, id="attention over a history"),
    ],
)
@torch.no_grad()
def test_columns_of_the_user_are_not_written_for_each_item(kind: type[nn.Module], columns: int) -> None:
    torch.manual_seed(0)
    module = kind()
    programs = rewritten(module)
    embeddings = torch.randn(ITEMS, USER + ITEM)
    repeated = torch.cat([embeddings[:1, :USER].expand(ITEMS, -1), embeddings[:, USER:]], dim=1)
    embeddings[1:, :USER] = float("nan")  # no row but the first is read
    with Written() as written:
        (answer,) = programs.items(embeddings, *programs.user(embeddings[:1]))
    torch.testing.assert_close(answer, module(repeated), rtol=0, atol=1e-5)
    assert written.columns <= columns
    assert 0 < programs.per_user <= programs.operators
    assert not programs.left_alone


def assert_as_repeated(programs: OncePerUser, module: nn.Module) -> None:
    """Compare a user and items with the module's own answer to the user repeated for each item."""
    embeddings = torch.randn(ITEMS, USER + ITEM)
    repeated = torch.cat([embeddings[:1, :USER].expand(ITEMS, -1), embeddings[:, USER:]], dim=1)
    (answer,) = programs.items(embeddings, *programs.user(embeddings[:1]))
    torch.testing.assert_close(answer, module(repeated), rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_operator_without_a_rule_runs_for_each_item_and_is_named() -> None:
    module = Unknown()
    programs = rewritten(module)
    assert_as_repeated(programs, module)
    assert "aten.layer_norm.default" in {str(node.target) for node in programs.left_alone}


@torch.no_grad()
def test_columns_of_a_cross_layer_are_multiplied_at_once() -> None:
    torch.manual_seed(0)
    module = CrossedItems()
    programs = rewritten(module)
    assert_as_repeated(programs, module)
    products = [node for node in programs.items.graph.nodes if str(node.target).startswith("aten.mul")]
    assert len(products) == len(module.up)
