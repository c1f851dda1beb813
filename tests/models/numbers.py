"""Models of dense inputs that are no float32 [B, width]: integers, booleans, one number, matrices."""

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.models.inputs import DIM, POOLED, NamedModel, numbers, of, pooled_ids, positional
from tests.support.models import collection

ALL = 3 * DIM


class Pooled(nn.Module):
    """Three pooled features and a number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED)
        self.top = nn.Linear(ALL, DIM)

    def pooled(self, keyed: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.top(self.bags(keyed).values())
        return answer


class Relation(Pooled):
    """Knowledge graphs: the integer id of a relation, into an nn.Embedding of the dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.relation = nn.Embedding(7, DIM)

    def forward(self, keyed: KeyedJaggedTensor, relation: Tensor) -> Tensor:
        moved: Tensor = self.pooled(keyed) + self.relation(relation)
        distance: Tensor = moved.abs().sum(dim=1)
        return distance


class RelationOfParameter(Pooled):
    """TwHIN: rows of a parameter's data by an integer input."""

    def __init__(self) -> None:
        super().__init__()
        self.translations = nn.Parameter(torch.rand(7, DIM))

    def forward(self, keyed: KeyedJaggedTensor, relation: Tensor) -> Tensor:
        return (self.pooled(keyed) * self.translations.data[relation]).sum(-1)


class Position(Pooled):
    """twitter's position debias: a column of integers, clamped, into an nn.Embedding; the other columns are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(10, DIM)

    def forward(self, keyed: KeyedJaggedTensor, discrete: Tensor) -> Tensor:
        position_vectors: Tensor = self.positions(discrete[:, 1].clamp(min=0, max=9).long())
        return self.pooled(keyed) + position_vectors


class History(Pooled):
    """MixFormer: a history of ids [B, T] into an nn.Embedding of the dense part, whose row 0 fills up; no mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.events = nn.Embedding(20, DIM, padding_idx=0)

    def forward(self, keyed: KeyedJaggedTensor, history: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = history != 0
        weight = mask.unsqueeze(-1).to(torch.float32)
        mean: Tensor = (self.events(history) * weight).sum(dim=1) / weight.sum(dim=1).clamp_min(1.0)
        return self.pooled(keyed) * mean


class Mask(Pooled):
    """A bool mask chooses which of a sample's vectors count."""

    def forward(self, keyed: KeyedJaggedTensor, vectors: Tensor, mask: Tensor) -> Tensor:
        masked = vectors.masked_fill(~mask.unsqueeze(-1), 0.0)
        count = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return (self.pooled(keyed) * masked.sum(dim=1) / count).sum(dim=1, keepdim=True)


class OneHot(Pooled):
    """An hour or a weekday as F.one_hot."""

    def __init__(self) -> None:
        super().__init__()
        self.hour = nn.Linear(24, DIM, bias=False)

    def forward(self, keyed: KeyedJaggedTensor, hour: Tensor) -> Tensor:
        hours: Tensor = self.hour(nn.functional.one_hot(hour, 24).float())
        return self.pooled(keyed) + hours


class Narrow(Pooled):
    """Loaders that keep integers narrow: a weekday as int8, a year as int16, stars as uint8."""

    def __init__(self) -> None:
        super().__init__()
        self.weekday = nn.Embedding(7, DIM)

    def forward(self, keyed: KeyedJaggedTensor, weekday: Tensor, year: Tensor, stars: Tensor) -> Tensor:
        weekdays: Tensor = self.weekday(weekday.long())
        return self.pooled(keyed) * weekdays + (year - 2000).unsqueeze(1) + stars.float() / 255


class Expert(Pooled):
    """The integer task of a sample chooses its expert: `experts[arange(B), task]`."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(DIM, 3 * 2)

    def forward(self, keyed: KeyedJaggedTensor, task: Tensor) -> Tensor:
        experts = self.experts(self.pooled(keyed)).view(-1, 3, 2)
        chosen: Tensor = experts[torch.arange(experts.size(0)), task]
        return chosen


class OneNumber(Pooled):
    """Loaders that give a price as [B]."""

    def forward(self, keyed: KeyedJaggedTensor, price: Tensor) -> Tensor:
        return self.pooled(keyed)[:, 0] * price + price.log1p()


class Scalar(Pooled):
    """GiGL: the type of a whole batch as a tensor without dimensions, repeated for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, DIM)

    def forward(self, keyed: KeyedJaggedTensor, kind: Tensor) -> Tensor:
        pooled = self.pooled(keyed)
        total: Tensor = (pooled + self.kinds(kind.repeat(pooled.size(0)))).sum(dim=1)
        return total


class Normalized(Pooled):
    """twitter's features: NaN and infinite ones to 0, sign · log1p, BatchNorm, and clamped by buffers."""

    least: Tensor
    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("least", torch.tensor(-5.0))
        self.register_buffer("most", torch.tensor(5.0), persistent=False)

    def forward(self, keyed: KeyedJaggedTensor, continuous: Tensor) -> Tensor:
        finite = torch.where(torch.isfinite(continuous), continuous, torch.zeros_like(continuous))
        logged = torch.sign(finite) * torch.log1p(torch.abs(finite))
        clamped = torch.clamp(self.norm(logged), min=self.least, max=self.most)
        return (self.pooled(keyed) * clamped).sum(dim=1)


def discrete(random: np.random.Generator, samples: int) -> Tensor:
    return of(random, 15, samples, 3).int()


NUMBERS: dict[str, NamedModel] = {
    "relation_ids": NamedModel(Relation, positional(pooled_ids, lambda random, n: of(random, 7, n))),
    "relation_ids_of_parameter": NamedModel(
        RelationOfParameter, positional(pooled_ids, lambda random, n: of(random, 7, n))
    ),
    "history_of_dense_part": NamedModel(History, positional(pooled_ids, lambda random, n: of(random, 20, n, 6))),
    "integer_columns": NamedModel(Position, positional(pooled_ids, discrete)),
    "bool_mask": NamedModel(
        Mask,
        positional(
            pooled_ids, lambda random, n: numbers(random, n, 4, DIM), lambda random, n: of(random, 2, n, 4).bool()
        ),
    ),
    "one_hot": NamedModel(OneHot, positional(pooled_ids, lambda random, n: of(random, 24, n))),
    "narrow_integers": NamedModel(
        Narrow,
        positional(
            pooled_ids,
            lambda random, n: of(random, 7, n).to(torch.int8),
            lambda random, n: (of(random, 100, n) + 1950).to(torch.int16),
            lambda random, n: of(random, 256, n, 1).to(torch.uint8),
        ),
    ),
    "expert_by_task": NamedModel(Expert, positional(pooled_ids, lambda random, n: of(random, 3, n))),
    "one_number": NamedModel(OneNumber, positional(pooled_ids, lambda random, n: numbers(random, n).abs())),
    "scalar": NamedModel(Scalar, positional(pooled_ids, lambda *_: torch.tensor(2, dtype=torch.int32))),
    "not_finite": NamedModel(Normalized, positional(pooled_ids, lambda random, n: numbers(random, n, DIM))),
}
