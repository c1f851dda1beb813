"""Numbers of ids, and scores by id, where a model could be read in several ways: served right, or refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.bundle.scores import DensePart
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.requests.accept import accept
from serving.requests.dense_inputs import encode_dense
from serving.requests.encoding import encode
from tests.support.long_cases import one_in
from tests.support.models import Spec
from tests.support.module_calls import answer_of_call, assert_close
from tests.support.scored_models import EXACT
from tests.support.sequence_models import sequences

DIM, LONGEST = 8, 6
TABLES = (Spec("film", 50, DIM, "NONE", ("seen", "target")), Spec("shop", 30, DIM, "NONE", ("visited",)))
Bags = Mapping[str, list[list[Any]]]


def keyed(bags: Bags) -> KeyedJaggedTensor:
    flat = [value for column in bags.values() for bag in column for value in bag]
    lengths = torch.tensor([len(bag) for column in bags.values() for bag in column], dtype=torch.int32)
    return KeyedJaggedTensor([*bags], torch.tensor(flat), lengths=lengths)


def jagged(bags: list[list[Any]]) -> JaggedTensor:
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    return JaggedTensor(torch.tensor([value for bag in bags for value in bag]), lengths=lengths)


def drawn(samples: int, seed: int, **lengths: Sequence[int]) -> dict[str, list[list[int]]]:
    """Ids of each key; and of `times` and `others` numbers, as many as there are ids of `seen` and `target`."""
    random = np.random.default_rng((seed, samples))
    counts = {key: lengths.get(key, random.integers(0, 5, samples)) for key in ("seen", "target", "visited")}
    counts |= {"times": counts["seen"], "others": counts["target"]}
    return {key: [random.integers(1, 30, count).tolist() for count in result] for key, result in counts.items()}


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = sequences(TABLES)

    def padded(self, values: Tensor, of: JaggedTensor) -> Tensor:
        answer: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(values, [of.offsets()], [LONGEST], 0.0)
        return answer.sum(dim=1)


IDS = ("seen", "target", "visited")
Call = Callable[[Bags], tuple[Any, ...]]


def ids(bags: Bags) -> KeyedJaggedTensor:
    return keyed({key: bags[key] for key in IDS})


class CalledAsANumber(Rows):
    """A JaggedTensor argument is called like a key of the KJT that no collection looks up."""

    def forward(self, keyed: KeyedJaggedTensor, times: JaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        weighted = rows["seen"].values() * keyed["times"].values().unsqueeze(1)
        target = rows["target"].values() * times.values().unsqueeze(1)
        return self.padded(weighted, rows["seen"]) + self.padded(target, rows["target"])


class CalledAsIds(Rows):
    """A JaggedTensor argument is called like a key that is looked up."""

    def forward(self, keyed: KeyedJaggedTensor, target: JaggedTensor) -> Tensor:
        answer: Tensor = self.rows(keyed)["target"].values() * target.values().unsqueeze(1)
        return answer


class OfOtherIds(Rows):
    """Rows of one key are found by the lengths of another: FBGEMM would read beyond them where they are fewer."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        moved = rows["visited"].values() * keyed["times"].values().unsqueeze(1)
        return self.padded(moved, rows["seen"]) + self.padded(rows["visited"].values(), rows["visited"])


class LengthsAlone(Rows):
    """Of `target` the model takes the lengths alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(DIM, DIM)

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
        rows = self.rows(keyed)
        users, target = self.padded(rows["seen"].values(), rows["seen"]), rows["target"]
        by_target = self.inward(torch.repeat_interleave(users, target.lengths(), dim=0))
        return {"score": self.padded(by_target, target), "user": users}


class Pairs(Rows):
    """Two candidates for each user, whose scores are [B, 2]."""

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
        rows = self.rows(keyed)["target"].values()
        return {"both": rows.view(-1, 2, DIM).sum(dim=2), "each": rows * 2}


class OfOneOfSeveral(Rows):
    """All keys have as many ids in the example: which ones the numbers are of, the forward says."""

    def forward(self, keyed: KeyedJaggedTensor, seen_price: JaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        user = self.padded(rows["seen"].values(), rows["seen"])
        scored = rows["target"].values().sum(dim=1) * seen_price.values()
        answer: Tensor = scored + torch.repeat_interleave(user.sum(dim=1), rows["target"].lengths())
        return answer


TWO = {"seen": (2,) * 5, "target": (2,) * 5, "visited": (2,) * 5}
RIGHT: list[tuple[type[Rows], Call, dict[str, str], Mapping[str, Sequence[int]], Mapping[str, int]]] = [
    (
        CalledAsANumber,
        lambda bags: (keyed({key: bags[key] for key in (*IDS, "times")}), jagged(bags["others"])),
        {"times": "times", "times.values": "others"},
        {},
        {},
    ),
    (CalledAsIds, lambda bags: (ids(bags), jagged(bags["others"])), {"target.values": "others"}, {}, {}),
    (LengthsAlone, lambda bags: (ids(bags),), {}, {}, {}),
    (Pairs, lambda bags: (ids(bags),), {}, {"target": (2,) * 5, "seen": (1,) * 5}, {"target": 2}),
    (OfOneOfSeveral, lambda bags: (ids(bags), jagged(bags["others"])), {"seen_price": "others"}, TWO, {}),
]


@pytest.mark.parametrize(
    ("kind", "call", "numbers", "example", "fixed"),
    one_in(2, [pytest.param(*case, id=case[0].__name__) for case in RIGHT]),
)
def test_ambiguous_per_id_numbers_are_served(
    kind: type[Rows],
    call: Call,
    numbers: Mapping[str, str],
    example: Mapping[str, Sequence[int]],
    fixed: Mapping[str, int],
    tmp_path: Path,
) -> None:
    """Alone and merged; ids of other lengths than the example has."""
    module = kind().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=call(drawn(5, 0, **example)))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert {dense_input.name for dense_input in part.inputs} == {*numbers}
        assert part.together == ()
        requests, expected = [], []
        for samples in (1, 2, 3, 8):
            bags = drawn(samples, 1, **{key: (count,) * samples for key, count in fixed.items()})
            dense = {name: bags[key] for name, key in numbers.items()}
            expected.append(answer_of_call(module, call(bags)))
            assert_close(engine.score({key: bags[key] for key in IDS}, dense), expected[-1])
            requests.append(request(part, bags, dense))
        merged = engine.answer([accept(engine.schema, value) for value in requests]).outcomes()
        for result, right in zip(merged, expected, strict=True):
            assert isinstance(result, Mapping), result
            assert_close(result, right)


def request(part: DensePart, bags: Bags, dense: Mapping[str, Any]) -> Any:
    encoded = encode_dense(part.inputs, dense)
    return replace(
        encode({key: bags[key] for key in IDS}), outputs=[output.name for output in part.outputs], dense=encoded
    )


def test_rows_split_by_the_lengths_of_another_key_are_served(tmp_path: Path) -> None:
    module = OfOtherIds().eval()

    def call(bags: Bags) -> tuple[KeyedJaggedTensor]:
        return (keyed({key: bags[key] for key in (*IDS, "times")}),)

    counts = (3, 0, 1, 2, 4)
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=call(drawn(5, 0, seen=counts, visited=counts)))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert [{*group} for group in part.together] == [{"seen", "visited"}]
        bags = drawn(3, 1, seen=(2, 5, 0), visited=(2, 5, 0))
        result = engine.score({key: bags[key] for key in IDS}, {"times": bags["times"]})
        assert_close(result, answer_of_call(module, call(bags)))
        fewer = {**bags, "visited": [[1], [2], []]}
        with pytest.raises(InvalidRequest, match=r"expected as many ids as '.*' has in each sample, the model puts"):
            engine.score({key: fewer[key] for key in IDS}, {"times": [1, 2]})


class OfTwo(Rows):
    def forward(self, one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(one)
        times = [
            torch.ops.fbgemm.jagged_to_padded_dense(
                value["times"].values().float().unsqueeze(1), [value["times"].offsets()], [LONGEST], 0.0
            )
            for value in (one, other)
        ]
        answer: Tensor = self.padded(rows["seen"].values(), rows["seen"]) + times[0].sum(1) + times[1].sum(1)
        return answer


class OfWeights(Rows):
    def forward(self, one: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(one)["seen"]
        return self.padded(rows.values() * one["times"].weights().unsqueeze(1), rows)


class WeightsOfIds(Rows):
    """A collection that does not pool takes no weights."""

    def forward(self, one: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(one)["seen"]
        return self.padded(rows.values() * one["seen"].weights().unsqueeze(1), rows)


class Repeated(Rows):
    def forward(self, one: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(one)
        return torch.repeat_interleave(
            self.padded(rows["seen"].values(), rows["seen"]), rows["target"].lengths(), dim=0
        )


class Seconds(Rows):
    def forward(self, one: KeyedJaggedTensor, now: Tensor) -> Tensor:
        rows = self.rows(one)["seen"]
        return self.padded(rows.values(), rows).sum(1) * (now % 10)


def weighted(bags: Bags) -> KeyedJaggedTensor:
    answer = keyed({key: bags[key] for key in (*IDS, "times")})
    return KeyedJaggedTensor(answer.keys(), answer.values(), torch.rand(len(answer.values())), answer.lengths())


REFUSED: list[tuple[type[Rows], Call, str]] = [
    (
        OfTwo,
        lambda bags: (keyed({key: bags[key] for key in (*IDS, "times")}), keyed({"times": bags["others"]})),
        "uses 'times', of several KeyedJaggedTensors: a request brings it once",
    ),
    (OfWeights, lambda bags: (weighted(bags),), "uses 'times', for its weights, and no collection looks it up"),
    (
        WeightsOfIds,
        lambda bags: (weighted(bags),),
        "uses the weights of 'seen', and the collection that looks it up takes none .* a JaggedTensor of their own",
    ),
    (Repeated, lambda bags: (ids(bags),), r"expected an answer with a row for each sample, got 'scores' \[n, 8\]"),
    (
        Seconds,
        lambda bags: (ids(bags), 1_700_000_000.5 + torch.arange(5, dtype=torch.float64)),
        r"now: has float64 numbers above 2\*\*24, such as 1700000000.5: requests bring FP32, which rounds them",
    ),
]


@pytest.mark.parametrize(
    ("kind", "call", "why"), one_in(2, [pytest.param(*case, id=case[0].__name__) for case in REFUSED])
)
def test_inputs_that_requests_lack_are_refused_by_name(
    kind: type[Rows], call: Call, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=call(drawn(5, 0)))
