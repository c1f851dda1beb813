"""Operators that write in place: what another operator, another slice or the caller reads stays as it is."""

import pytest
import torch
from torch import Tensor, nn

from tests.export.user_side.test_once_per_user import ITEM, ITEMS, USER, rewritten
from tests.support.long_cases import one_in


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(USER, ITEM), nn.Linear(ITEM, ITEM)

    def layers(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        return self.user(embeddings[:, :USER]), self.item(embeddings[:, USER:])


class Written(Model):
    """What the others compare with: nothing else takes the layer."""

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = self.layers(embeddings)
        return torch.relu(item) * user


class Residual(Model):
    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = self.layers(embeddings)
        return torch.relu(item) * user + item


class View(Model):
    """One view of a layer is written, and another is read."""

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = self.layers(embeddings)
        halves = item.reshape(-1, 2, ITEM // 2)
        return torch.cat([torch.sigmoid(halves.permute(0, 2, 1)).flatten(1), halves.flatten(1) * user], dim=1)


class Input(Model):
    """Of the caller."""

    def forward(self, embeddings: Tensor) -> Tensor:
        answer: Tensor = torch.relu(embeddings[:, USER:]) * self.user(embeddings[:, :USER])
        return answer


class Row(Model):
    """The user's, for the next slice."""

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = self.layers(embeddings)
        return torch.sigmoid(torch.tanh(user) * embeddings[:, USER:]) + torch.tanh(user) * item


class Constant(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(ITEM))

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = self.layers(embeddings)
        return torch.relu(self.scale) * item + torch.tanh(self.scale) * user


class Mask(Model):
    """A comparison has another dtype than the layer."""

    def forward(self, embeddings: Tensor) -> Tensor:
        user, item = self.layers(embeddings)
        answer: Tensor = (item > 0) * user + (self.item(item) < 0).float()
        return answer


@pytest.mark.parametrize("kind", one_in(3, [Written, Residual, View, Input, Row, Constant, Mask]))
@torch.no_grad()
def test_tensors_with_other_readers_are_not_written_to(kind: type[Model]) -> None:
    torch.manual_seed(0)
    module = kind()
    programs = rewritten(module)
    embeddings = torch.randn(ITEMS, USER + ITEM)
    embeddings[:, :USER] = embeddings[:1, :USER]
    user = programs.user(embeddings[:1])
    before = [tensor.clone() for tensor in (embeddings, *user, *programs.items.state_dict().values())]
    for _ in range(2):
        (answer,) = programs.items(embeddings, *user)
        torch.testing.assert_close(answer, module(embeddings), rtol=0, atol=1e-5)
    for tensor, copy in zip((embeddings, *user, *programs.items.state_dict().values()), before, strict=True):
        assert torch.equal(tensor, copy)
    if kind is Written:
        assert "aten.relu_" in programs.items.code
