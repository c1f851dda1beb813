"""Rankers made at random, in which inputs of a user and of items meet in places that nobody chose.

Each is a pool of tensors [B, width] that starts with the inputs. Blocks take some tensors of the pool, as a person
would write them, and add one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.support.models import Spec, collection, random_bags
from tests.support.sequence_models import kjt_of, sequences

USER_KEYS, ITEM_KEYS = ("user_a", "user_b", "history"), ("item_a", "item_b", "target")
USER_NUMBERS, ITEM_NUMBERS, SEGMENTS = "user_numbers", "item_numbers", "segments"
# What the items of a ranking request share.
USER_SIDE = (*USER_KEYS, USER_NUMBERS, SEGMENTS)
_LONGEST, _SEGMENTS = 6, 9

Bags = Mapping[str, list[list[int]]]


class Inputs(NamedTuple):
    """Three tensors [B, width]; the padded history, [B, longest, width], and where an event is, bool [B, longest]."""

    a: Tensor
    b: Tensor
    c: Tensor
    history: Tensor
    mask: Tensor


class Block(nn.Module):
    """Takes some tensors, and answers with one, [B, width]."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__()
        self.width, self.choice = width, int(random.integers(1 << 30))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.joined, self.narrow = nn.Linear(3 * width, width), nn.Linear(width, 2)

    def forward(self, x: Inputs) -> Tensor:
        raise NotImplementedError


class Tower(Block):
    def forward(self, x: Inputs) -> Tensor:
        answer: Tensor = self.second(torch.relu(self.joined(torch.cat([x.a, x.b, x.c], dim=1)))).tanh()
        return answer


class Cross(Block):
    """Low-rank cross layers (arXiv 2008.13535)."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        self.down = nn.ModuleList(nn.Linear(3 * width, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 3 * width, bias=bool(n)) for n in range(2))
        self.bias = nn.Parameter(torch.randn(3 * width) / 4)

    def forward(self, x: Inputs) -> Tensor:
        start = torch.cat([x.a, x.b, x.c], dim=-1)
        crossed = start
        for down, up in zip(self.down, self.up, strict=True):
            crossed = start * (up(down(crossed)) + self.bias) + crossed
        answer: Tensor = self.joined(crossed).tanh()
        return answer


class Gate(Block):
    def forward(self, x: Inputs) -> Tensor:
        gate = torch.sigmoid(self.first(x.a) - self.second(x.b))
        return gate * x.c + (1 - gate) * x.a


class Norm(Block):
    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Inputs) -> Tensor:
        normed: Tensor = self.norm(x.a + self.first(x.b))
        answer: Tensor = normed + self.second(functional.gelu(x.c))
        return answer


class Attention(Block):
    """DIN's attention (arXiv 1706.06978); the weighted sum in one of three ways."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        self.weigh = nn.Sequential(nn.Linear(4 * width, 5), nn.PReLU(), nn.Linear(5, 1))

    def forward(self, x: Inputs) -> Tensor:
        query = x.a.unsqueeze(1).expand(-1, x.history.shape[1], -1)
        logits = self.weigh(torch.cat([query, x.history, query - x.history, query * x.history], dim=-1))
        if self.choice % 3 == 0:
            return (torch.sigmoid(logits) * x.history * x.mask.unsqueeze(2)).sum(dim=1) + x.b
        weights = logits.squeeze(-1).masked_fill(~x.mask, -1e9).softmax(dim=1)
        if self.choice % 3 == 1:
            return torch.bmm(weights.unsqueeze(1), x.history).squeeze(1) - x.b
        return torch.einsum("bl,bld->bd", weights, x.history) * torch.sigmoid(x.b)


class Scaled(Block):
    """Attention by products of a query with the history."""

    def forward(self, x: Inputs) -> Tensor:
        keys, query = self.first(x.history), self.second(x.a)
        logits = torch.matmul(query.unsqueeze(1), keys.transpose(1, 2)) / self.width**0.5
        logits = torch.where(x.mask.unsqueeze(1), logits, torch.full_like(logits, -1e9))
        return torch.matmul(logits.softmax(-1), x.history)[:, 0] + x.c


class Heads(Block):
    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Inputs) -> Tensor:
        hidden = torch.zeros(x.mask.shape).masked_fill(~x.mask, -1e9)
        query = x.a.unsqueeze(1)
        attended, _ = self.attention(query, x.history, x.history, key_padding_mask=hidden, need_weights=False)
        answer: Tensor = attended.squeeze(1) + x.b
        return answer


class Recurrent(Block):
    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Inputs) -> Tensor:
        states, _ = self.gru(x.history)
        answer: Tensor = (states * x.mask.unsqueeze(-1)).sum(1) / x.mask.sum(1, keepdim=True).clamp(min=1) - x.a
        return answer


class Fields(Block):
    """Factorization machines over fields, and products of all pairs."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        self.pairs = nn.Linear(9, width)

    def forward(self, x: Inputs) -> Tensor:
        fields = torch.stack([x.a, x.b, x.c], dim=1)
        if self.choice % 2:
            return fields.sum(1).pow(2) / 8 - fields.pow(2).sum(1) / 8
        products = torch.bmm(fields, fields.transpose(1, 2))
        answer: Tensor = self.pairs(products.flatten(1)).tanh()
        return answer


class Interaction(Block):
    """DLRM's products of pairs of features (arXiv 1906.00091), among them events of a history."""

    def __init__(self, width: int, random: np.random.Generator) -> None:
        super().__init__(width, random)
        rows = 4 + self.choice % 3
        self.pairs = torch.triu_indices(rows, rows, self.choice % 2)
        self.over = nn.Linear(width + self.pairs.shape[1], width)

    def forward(self, x: Inputs) -> Tensor:
        features = torch.stack([x.a, self.first(x.b), x.c, torch.relu(x.b)], dim=1)
        features = torch.cat([x.history[:, : self.choice % 3], features], dim=1)
        products = torch.bmm(features, torch.transpose(features, 1, 2))
        if self.choice % 5 == 0:
            products = products.softmax(dim=2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        answer: Tensor = self.over(torch.cat([x.c, pairs], dim=1)).tanh()
        return answer


class Halves(Block):
    def forward(self, x: Inputs) -> Tensor:
        one, other = torch.cat([x.a, x.b], dim=1).chunk(2, dim=1)
        both = torch.cat([one[:, : self.width // 2], other[:, self.width // 2 :]], dim=1)
        return functional.normalize(both, dim=1) * x.c + torch.where(x.a > 0, x.a, 0.1 * x.b)


class Dots(Block):
    def forward(self, x: Inputs) -> Tensor:
        similar = (x.a * x.b).sum(dim=1, keepdim=True)
        shares = torch.softmax(self.narrow(x.c), dim=-1)
        return similar.tanh() * x.c + shares[:, :1] * x.a - shares[:, 1:] * x.b


class Residual(Block):
    def forward(self, x: Inputs) -> Tensor:
        layer = x.a + self.second(functional.silu(self.first(x.a - x.b)))
        latest = x.history[:, 0] * x.mask[:, :1]
        answer: Tensor = layer + self.joined(torch.cat([latest, x.b * x.c, x.a - x.c], dim=1))
        return answer


BLOCKS: tuple[type[Block], ...] = (
    Tower, Cross, Gate, Norm, Attention, Scaled, Heads, Recurrent, Fields, Halves, Dots, Residual,
    Interaction,
)  # fmt: skip


class Meeting(nn.Module):
    """A ranker over two pooled features of the user and two of the item, a history, numbers, and integers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        self.seed, self.width = seed, 2 * int(random.integers(2, 6))
        dim = 4 * int(random.integers(1, 4))
        keys = [*USER_KEYS[:2], *ITEM_KEYS[:2]]
        self.order = [keys[number] for number in random.permutation(4)]
        self.pooled = tuple(Spec(f"t_{key}", 30, dim, "SUM", (key,)) for key in self.order)
        self.rowed = (Spec("t_items", 40, 8, "NONE", ("history", "target")),)
        self.bags, self.rows = collection(self.pooled, seed=seed), sequences(self.rowed, seed=seed + 1)
        self.is_jagged = bool(random.random() < 0.3)
        self.inward = nn.ModuleDict({key: nn.Linear(dim, self.width) for key in self.order})
        self.events, self.segments = nn.Linear(8, self.width), nn.Embedding(_SEGMENTS, self.width)
        self.of_user, self.of_item = nn.Linear(3, self.width), nn.Linear(2, self.width)
        self.start = nn.Linear(4 * dim, self.width)
        count = int(random.integers(3, 8))
        self.blocks = nn.ModuleList(BLOCKS[random.integers(len(BLOCKS))](self.width, random) for _ in range(count))
        self.sources = [random.integers(0, 9 + number, 3).tolist() for number in range(count)]
        self.over = nn.Linear(3 * self.width, 2)
        self.last = random.integers(0, 9 + count, 2).tolist()

    def forward(
        self,
        ids: KeyedJaggedTensor,
        events: KeyedJaggedTensor,
        user_numbers: Tensor,
        item_numbers: Tensor,
        segments: Tensor,
    ) -> dict[str, Tensor]:
        pooled, rows = self.bags(ids), self.rows(events)
        history, mask = self._history(rows["history"])
        target = self.events(rows["target"].to_padded_dense(1)[:, 0])
        pool = [self.inward[key](pooled[key]) for key in self.order]
        pool += [self.start(pooled.values()), self.of_user(user_numbers), self.of_item(item_numbers)]
        pool += [self.segments(segments).mean(1), target]
        for block, sources in zip(self.blocks, self.sources, strict=True):
            a, b, c = (pool[number] for number in sources)
            pool.append(block(Inputs(a, b, c, history, mask)))
        answer = self.over(torch.cat([pool[-1], *(pool[number] for number in self.last)], dim=1))
        return {"click": answer[:, 0], "both": answer, "user": pool[5] + pool[7]}

    def _history(self, rows: JaggedTensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(_LONGEST).unsqueeze(0) < rows.lengths().unsqueeze(1)
        if self.is_jagged:  # the layer is applied to the rows that there are
            states = torch.ops.fbgemm.jagged_to_padded_dense(
                self.events(rows.values()).tanh(), [rows.offsets()], [_LONGEST], 0.0
            )
            return states, mask
        return self.events(rows.to_padded_dense(_LONGEST)), mask

    def request(self, random: np.random.Generator, samples: int) -> tuple[Bags, dict[str, npt.NDArray[Any]]]:
        """Ids and dense inputs of some samples; every sample has its own user."""
        bags = random_bags(random, self.pooled, samples, longest=4)
        bags["history"] = [random.integers(0, 40, random.integers(0, 9)).tolist() for _ in range(samples)]
        bags["target"] = [[int(random.integers(0, 40))] for _ in range(samples)]
        dense: dict[str, npt.NDArray[Any]] = {
            USER_NUMBERS: random.standard_normal((samples, 3), np.float32),
            ITEM_NUMBERS: random.standard_normal((samples, 2), np.float32),
            SEGMENTS: random.integers(0, _SEGMENTS, (samples, 2)),
        }
        return bags, dense

    def arguments(self, bags: Bags, dense: Mapping[str, npt.NDArray[Any]]) -> tuple[Any, ...]:
        """The arguments of a call."""
        ids = kjt_of({key: bags[key] for key in self.order})
        events = kjt_of({key: bags[key] for key in ("history", "target")})
        return ids, events, *(torch.from_numpy(dense[name]) for name in (USER_NUMBERS, ITEM_NUMBERS, SEGMENTS))


def meeting(seed: int) -> Meeting:
    """A ranker in eval mode. Each call makes an equal one."""
    return Meeting(seed).eval()
