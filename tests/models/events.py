"""Models of events: numbers for each id of a history, such as its times; and a score for each of several candidates."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.models.inputs import DIM, ROWS, Example, NamedModel, ids, numbers, of
from tests.models.sequences import LONGEST, Rows
from tests.support.sequence_models import sequences

ACTIONS = 7
# Seconds since 1970: no float32 has them all.
NOW = 1_700_000_000


class Times(Rows):
    """HSTU: how long ago an event was is put into buckets, which have an embedding; the times are a key of the KJT."""

    def __init__(self) -> None:
        super().__init__()
        self.ago = nn.Embedding(20, DIM)

    def forward(self, keyed: KeyedJaggedTensor, now: Tensor) -> Tensor:
        history, times = self.rows(keyed)["seen"], keyed["seen_time"].values()
        ago = torch.repeat_interleave(now, history.lengths(), dim=0) - times
        rows = history.values() + self.ago(ago.float().clamp(min=1).log2().long().clamp(max=19))
        padded = torch.ops.fbgemm.jagged_to_padded_dense(rows, [history.offsets()], [LONGEST], 0.0)
        return self.top(padded.sum(dim=1)).squeeze(1)  # type: ignore[no-any-return]


@dataclass
class Session:
    """What a loader of sessions brings."""

    keyed: KeyedJaggedTensor
    actions: JaggedTensor
    measured: JaggedTensor


class Actions(Rows):
    """The kind of each event reads an embedding of the model's own; beside it some numbers of each."""

    def __init__(self) -> None:
        super().__init__()
        self.actions, self.measured = nn.Embedding(ACTIONS, DIM), nn.Linear(3, DIM)

    def forward(self, session: Session) -> dict[str, Tensor]:
        history = self.rows(session.keyed)["seen"]
        rows = history.values() * self.actions(session.actions.values()) + self.measured(session.measured.values())
        padded = JaggedTensor(rows, lengths=history.lengths()).to_padded_dense(LONGEST)
        return {"user": padded.amax(dim=1), "bought": self.top(padded.sum(dim=1))}


class ByPart(Rows):
    """TorchEasyRec's ScriptWrapper, with sequences: values and lengths of each in a dict, also of their prices."""

    def __init__(self) -> None:
        super().__init__()
        self.prices = nn.Linear(3, DIM)

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        keys = ["seen", "target", "visited"]
        keyed = KeyedJaggedTensor(
            keys,
            torch.cat([data[f"{key}.values"] for key in keys], dim=-1),
            lengths=torch.cat([data[f"{key}.lengths"] for key in keys], dim=-1),
        )
        prices = JaggedTensor(values=data["price.values"], lengths=data["price.lengths"])
        history = self.rows(keyed)["seen"].to_padded_dense(LONGEST) + self.prices(prices.to_padded_dense(LONGEST))
        return {"bought": self.top(history.amax(dim=1))}


class Ranked(Rows):
    """A score for each candidate, by attention over the history: [n, events]; and the candidates as they come out."""

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Any]:
        rows = self.rows(keyed)
        targets = rows["target"].values()
        history = torch.repeat_interleave(rows["seen"].to_padded_dense(LONGEST), rows["target"].lengths(), dim=0)
        weights = torch.bmm(history, targets.unsqueeze(2)).softmax(dim=1)
        met = (weights * history).sum(dim=1)
        return {"score": self.top(met * targets), "met": JaggedTensor(met, lengths=rows["target"].lengths())}


class Joined(Rows):
    """DlrmHSTU: history and candidates are KeyedJaggedTensors that the forward joins; so are their rows and times."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences(ROWS[:1])
        self.hour = nn.Embedding(24, DIM)
        self.tasks = nn.Linear(DIM, 2)

    def forward(self, history: KeyedJaggedTensor, candidates: KeyedJaggedTensor) -> Tensor:
        every = KeyedJaggedTensor.from_lengths_sync(
            keys=history.keys() + candidates.keys(),
            values=torch.cat([history.values(), candidates.values()]),
            lengths=torch.cat([history.lengths(), candidates.lengths()]),
        )
        rows = self.rows(every)
        count = candidates.lengths().view(len(candidates.keys()), -1)[0]
        embedded_times = [
            self.hour(kjt[key].values() // 3600 % 24) for kjt, key in ((history, "seen_time"), (candidates, "asked"))
        ]
        events, targets = rows["seen"].values() + embedded_times[0], rows["target"].values() + embedded_times[1]
        longest = int(rows["seen"].lengths().max().item()) + int(count.max().item())
        both = torch.cat(
            [
                JaggedTensor(events, lengths=rows["seen"].lengths()).to_padded_dense(longest),
                JaggedTensor(targets, lengths=count).to_padded_dense(longest),
            ],
            dim=1,
        )
        users = both.sum(dim=1)
        return self.tasks(torch.repeat_interleave(users, count, dim=0) * targets)  # type: ignore[no-any-return]


class SideBySide(Rows):
    """HSTU and SIM: an event has several ids, each of a key of its own; their rows lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(2 * DIM, DIM)

    def forward(self, keyed: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(keyed)
        both = self.inward(torch.cat([rows["seen"].values(), rows["visited"].values()], dim=1)).relu()
        padded = torch.ops.fbgemm.jagged_to_padded_dense(both, [rows["visited"].offsets()], [LONGEST], 0.0)
        by_task = torch.stack([padded.sum(dim=(1, 2)), padded.amax(dim=(1, 2))])
        return by_task, self.top(both * rows["seen"].values())


class OwnLengths(Rows):
    """Numbers of another length than any key has."""

    def forward(self, session: Session) -> Tensor:
        history = self.rows(session.keyed)["seen"].to_padded_dense(LONGEST)
        return self.top((history * session.measured.to_padded_dense(LONGEST)).sum(dim=1))  # type: ignore[no-any-return]


def timed(random: np.random.Generator, samples: int, *keys: str, time: str) -> KeyedJaggedTensor:
    """Ids of some keys, and a time for each id of the first; up to `LONGEST` of each."""
    by_event = ids(random, samples, *keys, most=LONGEST)
    lengths = by_event[keys[0]].lengths()
    times = NOW - of(random, 10**6, int(lengths.sum()))
    return KeyedJaggedTensor(
        [*keys, time], torch.cat([by_event.values(), times]), lengths=torch.cat([by_event.lengths(), lengths])
    )


def times(random: np.random.Generator, samples: int) -> Example:
    now = NOW + of(random, 10**6, samples)
    return timed(random, samples, "seen", "target", "visited", time="seen_time"), now


def session(random: np.random.Generator, samples: int) -> Session:
    keyed = ids(random, samples, "seen", "target", "visited", most=LONGEST)
    lengths = keyed["seen"].lengths()
    count = int(lengths.sum())
    actions = JaggedTensor(of(random, ACTIONS, count), lengths=lengths)
    return Session(keyed, actions, JaggedTensor(numbers(random, count, 3), lengths=lengths))


def of_other_lengths(random: np.random.Generator, samples: int) -> Example:
    base = session(random, samples)
    lengths = torch.arange(1, samples + 1) % LONGEST + 1
    return (Session(base.keyed, base.actions, JaggedTensor(numbers(random, int(lengths.sum()), 1), lengths=lengths)),)


def side_by_side(random: np.random.Generator, samples: int) -> Example:
    lengths = torch.from_numpy(random.integers(0, LONGEST + 1, samples, dtype=np.int32))
    return (ids(random, samples, "seen", "target", "visited", seen=lengths, visited=lengths),)


def by_part(random: np.random.Generator, samples: int) -> Example:
    keyed = ids(random, samples, "seen", "target", "visited", most=LONGEST)
    parts = {f"{key}.{what}": value for key in keyed.keys() for what, value in of_key(keyed[key]).items()}  # noqa: SIM118
    lengths = parts["seen.lengths"]
    return ({**parts, "price.values": numbers(random, int(lengths.sum()), 3), "price.lengths": lengths.clone()},)


def of_key(jagged: JaggedTensor) -> dict[str, Tensor]:
    return {"values": jagged.values(), "lengths": jagged.lengths()}


def candidates(random: np.random.Generator, samples: int) -> Example:
    return (ids(random, samples, "seen", "target", "visited", least=1, most=LONGEST),)


def joined(random: np.random.Generator, samples: int) -> Example:
    both = [timed(random, samples, *keys, time=time) for *keys, time in (("seen", "seen_time"), ("target", "asked"))]
    return both[0], both[1]


EVENTS: dict[str, NamedModel] = {
    "times_of_events": NamedModel(Times, times),
    "actions_of_events": NamedModel(Actions, lambda random, samples: (session(random, samples),)),
    "attention_by_candidate": NamedModel(Ranked, candidates),
    "joined_histories": NamedModel(Joined, joined),
    "rows_side_by_side": NamedModel(SideBySide, side_by_side),
    "events_by_part": NamedModel(ByPart, by_part),
    "numbers_of_other_lengths": NamedModel(
        OwnLengths, of_other_lengths, refused="uses 'session.measured', which no collection looks up"
    ),
}
