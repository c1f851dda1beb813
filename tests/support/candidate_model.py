"""A model with a number for each id of a history, and a score for each of a user's candidates; and what it is asked."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.support.models import Spec
from tests.support.sequence_models import kjt_of, sequences

DIM, LONGEST = 8, 5
TABLES = (Spec("film", 60, DIM, "NONE", ("seen", "target")), Spec("shop", 30, DIM, "NONE", ("bought_in",)))
ROWS = {key: spec.rows for spec in TABLES for key in spec.features}
# Seconds since 1970, which no float32 has.
NOW = 1_700_000_001
Asked = tuple[dict[str, Any], dict[str, Any]]


@dataclass
class Session:
    ids: KeyedJaggedTensor
    times: JaggedTensor
    paid: JaggedTensor
    now: Tensor


class Candidates(nn.Module):
    """Each event has a film, a shop, a time and two amounts; each candidate of the user has a score."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = sequences(TABLES)
        self.ago, self.paid, self.joined = nn.Embedding(12, DIM), nn.Linear(2, DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, session: Session) -> dict[str, Tensor]:
        rows = self.rows(session.ids)
        histories, targets = rows["seen"], rows["target"]
        ago = torch.repeat_interleave(session.now, histories.lengths(), dim=0) - session.times.values()
        events = self.joined(torch.cat([histories.values(), rows["bought_in"].values()], dim=1))
        events = events + self.ago((ago % 12).long()) * self.paid(session.paid.values())
        history = torch.ops.fbgemm.jagged_to_padded_dense(events, [histories.offsets()], [LONGEST], 0.0)
        users = torch.repeat_interleave(history.sum(dim=1), targets.lengths(), dim=0)
        return {
            "user": history.amax(dim=1),
            "score": (users * targets.values()).sum(dim=1),
            "odd": (ago % 2).float(),
        }


MODULE = Candidates().eval()


def session_of(bags: Mapping[str, Any], dense: Mapping[str, Any]) -> Session:
    lengths = torch.tensor([len(bag) for bag in bags["seen"]], dtype=torch.int32)
    times = torch.tensor([number for bag in dense["session.times"] for number in bag], dtype=torch.int64)
    paid = torch.tensor([number for bag in dense["session.paid"] for number in bag], dtype=torch.float32).view(-1, 2)
    of_ids = [JaggedTensor(values, lengths=lengths) for values in (times, paid)]
    return Session(kjt_of(bags), of_ids[0], of_ids[1], torch.tensor(dense["session.now"], dtype=torch.int64))


def expected(bags: Mapping[str, Any], dense: Mapping[str, Any]) -> dict[str, Any]:
    """What the module answers by itself, run by TorchRec; it cannot be called without samples."""
    if not bags["seen"]:
        return {"user": np.empty((0, DIM)), "score": np.empty(0), "odd": np.empty(0)}
    with torch.no_grad():
        return {name: value.numpy() for name, value in MODULE(session_of(bags, dense)).items()}


def ask(random: np.random.Generator, samples: int, longest: int = LONGEST) -> Asked:
    """Ids in bags, and numbers: of each sample, and of each id of `seen`."""

    def bags_of(lengths: Any, make: Any) -> list[Any]:
        return [[make() for _ in range(length)] for length in lengths]

    history_lengths, target = random.integers(0, longest + 1, (2, samples))
    bags = {
        key: bags_of(lengths, partial(random.integers, 0, ROWS[key]))
        for key, lengths in (("seen", history_lengths), ("target", target), ("bought_in", history_lengths))
    }
    bags = {key: [[int(id_) for id_ in bag] for bag in every] for key, every in bags.items()}
    return bags, {
        "session.now": [NOW + int(number) for number in random.integers(0, 10**6, samples)],
        "session.times": bags_of(history_lengths, lambda: NOW - int(random.integers(0, 10**6))),
        "session.paid": bags_of(history_lengths, lambda: random.standard_normal(2).tolist()),
    }


def assert_right(answer: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    for name, numbers in answer.items():
        assert numbers.shape == right[name].shape, name
        np.testing.assert_allclose(numbers, right[name], rtol=1e-5, atol=1e-5, err_msg=name)


def example() -> tuple[Session]:
    return (session_of(*ask(np.random.default_rng(1), 6)),)


def build() -> nn.Module:
    """For `--model`."""
    return copy.deepcopy(MODULE)  # a caller may move it to another device
