"""Whole rankers made at random: pooled features, sequences, numbers and integers, met in ways that public models have.

What is drawn: the tables and who shares them, what reads each sequence and in which order, the arguments of the call,
and the form of the answer. Each reads what it is given as a person would write it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.support.models import Spec, collection, random_bags
from tests.support.sequence_models import kjt_of, sequences


@dataclass(frozen=True)
class Request:
    """What is asked: the ids of each sample by key, numbers and integers; and a time for each id of some keys."""

    bags: Mapping[str, list[list[int]]]
    numbers: npt.NDArray[np.float32]
    relation: npt.NDArray[np.int64]
    times: Mapping[str, list[list[float]]]

    def shared(self, keys: Collection[str], samples: int) -> "Request":
        """Of `samples` samples, all of which have the first bags of some keys."""

        def all_have(bags: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            return {key: bag[:1] * samples if key in keys else bag for key, bag in bags.items()}

        return replace(self, bags=all_have(self.bags), times=all_have(self.times))


@dataclass
class Batch:
    """What a data loader brings."""

    ids: KeyedJaggedTensor
    events: KeyedJaggedTensor
    numbers: Tensor
    relation: Tensor
    times: JaggedTensor | None


def mask_of(rows: JaggedTensor, longest: int) -> Tensor:
    """bool [B, longest]: where an event is."""
    mask: Tensor = torch.arange(longest).unsqueeze(0) < rows.lengths().unsqueeze(1)
    return mask


class Reader(nn.Module):
    """What becomes of a sequence: rows, and a query [B, width], in; [B, width] out."""

    def __init__(self, dim: int, width: int, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.inward = nn.Linear(dim, width)
        self.positions = nn.Parameter(torch.randn(longest, width) / 4)

    def padded(self, rows: JaggedTensor) -> Tensor:
        states_of_rows: Tensor = self.inward(rows.to_padded_dense(self.longest)) + self.positions
        return states_of_rows


class MeanReader(Reader):
    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        mask = mask_of(rows, self.longest).unsqueeze(-1)
        return (self.padded(rows) * mask).sum(1) / mask.sum(1).clamp(min=1) + query


class MaximumReader(Reader):
    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        mask = mask_of(rows, self.longest).unsqueeze(-1)
        return self.padded(rows).masked_fill(~mask, -5.0).amax(dim=1) * query.sigmoid()


class LastReader(Reader):
    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        last = (rows.lengths().long() - 1).clamp(min=0, max=self.longest - 1)
        padded = self.padded(rows)
        return torch.cat([padded[torch.arange(padded.size(0)), last], query], 1)[:, : query.size(1)]


class TargetReader(Reader):
    """DIN's attention."""

    def __init__(self, dim: int, width: int, longest: int) -> None:
        super().__init__(dim, width, longest)
        self.weigh = nn.Sequential(nn.Linear(3 * width, 4), nn.PReLU(), nn.Linear(4, 1))

    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        history = self.padded(rows)
        queries = query.unsqueeze(1).expand(-1, history.shape[1], -1)
        logits = self.weigh(torch.cat([history, queries, history * queries], dim=-1)).squeeze(-1)
        weights = logits.masked_fill(~mask_of(rows, self.longest), -1e9).softmax(dim=1)
        return torch.bmm(weights.unsqueeze(1), history).squeeze(1)


class SelfReader(Reader):
    """A block of a transformer, and the mean."""

    def __init__(self, dim: int, width: int, longest: int) -> None:
        super().__init__(dim, width, longest)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        states = self.padded(rows)
        hidden = torch.zeros(states.shape[:2]).masked_fill(~mask_of(rows, self.longest), -1e9)
        attended, _ = self.attention(query.unsqueeze(1), states, states, key_padding_mask=hidden, need_weights=False)
        answer: Tensor = self.norm(attended.squeeze(1) + query)
        return answer


class RecurrentReader(Reader):
    def __init__(self, dim: int, width: int, longest: int) -> None:
        super().__init__(dim, width, longest)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        states, _ = self.gru(self.padded(rows))
        answer: Tensor = (states * mask_of(rows, self.longest).unsqueeze(-1)).sum(1) - query
        return answer


class JaggedReader(Reader):
    """FBGEMM's jagged operators: positions are added to rows, which become padded then."""

    def forward(self, rows: JaggedTensor, query: Tensor) -> Tensor:
        samples = rows.lengths().size(0)
        added, offsets = torch.ops.fbgemm.jagged_dense_elementwise_add_jagged_output(
            self.inward(rows.values()), [rows.offsets()], self.positions.unsqueeze(0).expand(samples, -1, -1)
        )
        padded = torch.ops.fbgemm.jagged_to_padded_dense(added, offsets, [self.longest], 0.0)
        answer: Tensor = padded.tanh().sum(1) + query
        return answer


READERS: tuple[type[Reader], ...] = (
    MeanReader, MaximumReader, LastReader, TargetReader, SelfReader, RecurrentReader, JaggedReader
)  # fmt: skip


class Ranker(nn.Module):
    """One to three tables of rows and one to three that are pooled, a tower for each, and layers over all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        random = np.random.default_rng(seed)
        self.width = 2 * int(random.integers(1, 5))
        self.pooled = tuple(
            Spec(f"p{n}", *_size(random), str(random.choice(["SUM", "MEAN"])), _keys(random, f"p{n}"))
            for n in range(random.integers(1, 4))
        )
        dim = 4 * int(random.integers(1, 5))
        self.rowed = tuple(
            Spec(f"r{n}", int(random.integers(5, 60)), dim, "NONE", _keys(random, f"r{n}"))
            for n in range(random.integers(1, 4))
        )
        self.bags, self.rows = collection(self.pooled, seed=seed), sequences(self.rowed, seed=seed + 1)
        self.events = [key for spec in self.rowed for key in spec.features]
        self.order = random.permutation(len(self.events)).tolist()
        self.relations = nn.Embedding(9, self.width)
        self.numbers = nn.Linear(int(random.integers(1, 5)), self.width)
        widths = sum(spec.dim * len(spec.features) for spec in self.pooled)
        self.tower = nn.Sequential(nn.Linear(widths, self.width), nn.ReLU())
        self.readers = nn.ModuleList(
            READERS[random.integers(len(READERS))](dim, self.width, int(random.integers(1, 7))) for _ in self.events
        )
        self.over = nn.Linear(self.width * (1 + len(self.events)), 3)
        self.arguments, self.kind = int(random.integers(4)), int(random.integers(4))
        self.integers = int(random.integers(1, 4))
        extra_random = np.random.default_rng((seed, 7))
        self.timed, self.candidates = (
            str(extra_random.choice(self.events)) if extra_random.random() < 0.5 else "" for _ in "ab"
        )
        self.together = len(self.events) > 1 and bool(extra_random.random() < 0.3)
        self.time, self.candidate = nn.Linear(1, dim), nn.Linear(dim, self.width)

    def scores(
        self,
        ids: KeyedJaggedTensor,
        events: KeyedJaggedTensor,
        numbers: Tensor,
        relation: Tensor,
        times: JaggedTensor | None,
    ) -> Any:
        query = self.tower(self.bags(ids).values()) + self.numbers(numbers) + self.relations(relation).sum(1)
        rows = self.rows(events)
        if times is not None:
            moved = self.time(times.values().unsqueeze(1)).tanh()
            rows[self.timed] = JaggedTensor(rows[self.timed].values() + moved, lengths=rows[self.timed].lengths())
        if self.together:  # two ids of one event
            one, other = (rows[key] for key in self.events[:2])
            rows[self.events[0]] = JaggedTensor(one.values() * other.values(), lengths=one.lengths())
        parts = [query]
        for number in self.order:
            reader: Any = self.readers[number]
            parts.append(reader(rows[self.events[number]], parts[0] if number % 2 else parts[-1]))
        answer = self.answer(parts)
        if not self.candidates:
            return answer
        of = rows[self.candidates]
        users = torch.repeat_interleave(parts[-1], of.lengths(), dim=0)
        return {"answer": answer, "candidate": users * self.candidate(of.values())}

    def answer(self, parts: list[Tensor]) -> Any:
        logits, query = self.over(torch.cat(parts, dim=1)), parts[0]
        if self.kind == 0:
            return logits
        if self.kind == 1:
            return logits[:, 0].sigmoid()
        if self.kind == 2:
            return {"click": logits[:, :1], "buy": logits[:, 1], "states": torch.stack(parts, dim=1)}
        return logits.softmax(dim=1), query

    def request(self, random: np.random.Generator, samples: int, longest: int) -> Request:
        bags = random_bags(random, (*self.pooled, *self.rowed), samples, longest=longest)
        if self.together:
            rows = {key: spec.rows for spec in self.rowed for key in spec.features}[self.events[1]]
            bags[self.events[1]] = [[(7 * id_ + 3) % rows for id_ in bag] for bag in bags[self.events[0]]]
        times = {self.timed: [[id_ / 9 - 1 for id_ in bag] for bag in bags[self.timed]]} if self.timed else {}
        return Request(
            bags,
            random.standard_normal((samples, self.numbers.in_features), np.float32),
            random.integers(0, self.relations.num_embeddings, (samples, self.integers)),
            times,
        )

    def example(self, request: Request) -> tuple[Any, ...]:
        """The arguments of one call."""
        bags = [
            {key: request.bags[key] for spec in specs for key in spec.features} for specs in (self.pooled, self.rowed)
        ]
        ids, events = map(kjt_of, bags)
        times = None
        for bags_of in request.times.values():
            flat = torch.tensor([time for bag in bags_of for time in bag], dtype=torch.float32)
            times = JaggedTensor(flat, lengths=torch.tensor([*map(len, bags_of)], dtype=torch.int32))
        batch = Batch(ids, events, torch.from_numpy(request.numbers), torch.from_numpy(request.relation), times)
        return ARGUMENTS[self.arguments][1](batch)


class OfArguments(Ranker):
    def forward(
        self,
        ids: KeyedJaggedTensor,
        events: KeyedJaggedTensor,
        numbers: Tensor,
        relation: Tensor,
        times: JaggedTensor | None = None,
    ) -> Any:
        return self.scores(ids, events, numbers, relation, times)


class OfBatch(Ranker):
    def forward(self, batch: Batch) -> Any:
        return self.scores(batch.ids, batch.events, batch.numbers, batch.relation, batch.times)


class OfDict(Ranker):
    def forward(self, features: dict[str, Any]) -> Any:
        names = ("ids", "events", "numbers", "relation", "times")
        return self.scores(*(features[name] for name in names))


class OfOneKjt(Ranker):
    """All ids in one KJT, whose collections take their keys each."""

    def forward(
        self, keyed: KeyedJaggedTensor, numbers: Tensor, relation: Tensor, times: JaggedTensor | None = None
    ) -> Any:
        return self.scores(keyed, keyed, numbers, relation, times)


ARGUMENTS: tuple[tuple[type[Ranker], Callable[[Batch], tuple[Any, ...]]], ...] = (
    (OfArguments, lambda batch: (batch.ids, batch.events, batch.numbers, batch.relation, batch.times)),
    (OfBatch, lambda batch: (batch,)),
    (OfDict, lambda batch: ({**vars(batch)},)),
    (OfOneKjt, lambda batch: (_joined(batch.ids, batch.events), batch.numbers, batch.relation, batch.times)),
)


def _joined(*parts: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.concat([*parts])


def ranker(seed: int) -> Ranker:
    """A ranker in eval mode. Each call makes an equal one."""
    kind, _ = ARGUMENTS[Ranker(seed).arguments]
    return kind(seed).eval()


def _size(random: np.random.Generator) -> tuple[int, int]:
    return int(random.integers(5, 60)), 4 * int(random.integers(1, 7))


def _keys(random: np.random.Generator, table: str) -> tuple[str, ...]:
    return tuple(f"{table}_{letter}" for letter in "abc"[: random.integers(1, 3)])
