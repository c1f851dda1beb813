"""KeyedJaggedTensors that a forward makes of offsets, or of one tensor of lengths for several keys: served as TorchRec
answers, for requests of any other lengths; and refused where a request has lengths that the forward could not get.
"""

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
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.requests.accept import accept
from serving.requests.encoding import encode
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection
from tests.support.module_calls import answer_of_call, assert_close
from tests.support.scored_models import EXACT
from tests.support.sequence_models import sequences

DIM, LONGEST = 8, 6
KEYS = ("seen", "visited")
Bags = Mapping[str, list[list[int]]]


def specs(pooling: str) -> tuple[Spec, ...]:
    return Spec("film", 40, DIM, pooling, ("seen",)), Spec("shop", 40, DIM, pooling, ("visited",))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.top = sequences(specs("NONE")), nn.Linear(DIM, 1)

    def padded(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(ids)
        history, visited = (rows[key].to_padded_dense(LONGEST) for key in KEYS)
        return history, visited

    def scored(self, ids: KeyedJaggedTensor) -> Tensor:
        history, visited = self.padded(ids)
        answer: Tensor = self.top(history.sum(1) - visited.sum(1))
        return answer


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.top = collection(specs("MEAN")), nn.Linear(2 * DIM, 1)

    def scored(self, ids: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.top(self.bags(ids).values())
        return answer


class JoinedLengths(Rows):
    """Events with a film and a shop each."""

    def forward(self, films: Tensor, shops: Tensor, lengths: Tensor) -> Tensor:
        ids = KeyedJaggedTensor([*KEYS], torch.cat([films, shops]), lengths=torch.cat([lengths, lengths]))
        history, visited = self.padded(ids)
        answer: Tensor = self.top((history * visited).sum(1) * lengths.unsqueeze(1))
        return answer


class RepeatedLengths(Rows):
    """Their rows are put side by side before they are padded."""

    def forward(self, films: Tensor, shops: Tensor, lengths: Tensor) -> Tensor:
        rows = self.rows(KeyedJaggedTensor.from_lengths_sync([*KEYS], torch.cat([films, shops]), lengths.repeat(2)))
        both = JaggedTensor(rows["seen"].values() * rows["visited"].values(), lengths=lengths)
        answer: Tensor = self.top(both.to_padded_dense(LONGEST).sum(1))
        return answer


class RepeatedLengthsPooled(Pooled):
    def forward(self, films: Tensor, shops: Tensor, lengths: Tensor) -> Tensor:
        return self.scored(KeyedJaggedTensor([*KEYS], torch.cat([films, shops]), lengths=lengths.repeat(2)))


class LengthsOfTheOther(Pooled):
    """Of two JaggedTensors, the lengths of the first one count for both."""

    def forward(self, films: JaggedTensor, shops: JaggedTensor) -> Tensor:
        lengths = torch.cat([films.lengths()] * 2)
        return self.scored(KeyedJaggedTensor([*KEYS], torch.cat([films.values(), shops.values()]), lengths=lengths))


class OffsetsOfAll(Rows):
    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.scored(KeyedJaggedTensor.from_offsets_sync([*KEYS], values, offsets))


class OffsetsOfAllPooled(Pooled):
    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.scored(KeyedJaggedTensor([*KEYS], values, offsets=offsets))


class OffsetsByKey(Rows):
    def forward(self, films: Tensor, film_offsets: Tensor, shops: Tensor, shop_offsets: Tensor) -> Tensor:
        jagged_by_key = {
            "seen": JaggedTensor(films, offsets=film_offsets),
            "visited": JaggedTensor(shops, offsets=shop_offsets),
        }
        return self.scored(KeyedJaggedTensor.from_jt_dict(jagged_by_key))


class OwnDifferences(Rows):
    """The forward makes lengths of offsets, and pads by the offsets."""

    def forward(self, films: Tensor, film_offsets: Tensor, shops: Tensor, shop_offsets: Tensor) -> Tensor:
        lengths = [film_offsets[1:] - film_offsets[:-1], shop_offsets.diff()]
        rows = self.rows(KeyedJaggedTensor([*KEYS], torch.cat([films, shops]), lengths=torch.cat(lengths)))
        padded = torch.ops.fbgemm.jagged_to_padded_dense(rows["seen"].values(), [film_offsets], [LONGEST], 0.0)
        answer: Tensor = self.top(padded.sum(1) - rows["visited"].to_padded_dense(LONGEST).sum(1))
        return answer


class LengthsOfEach(Rows):
    """The lengths of both keys are tensors of their own, which are the same in the example."""

    def forward(self, films: Tensor, film_lengths: Tensor, shops: Tensor, shop_lengths: Tensor) -> Tensor:
        lengths = torch.cat([film_lengths, shop_lengths])
        return self.scored(KeyedJaggedTensor([*KEYS], torch.cat([films, shops]), lengths=lengths))


def flat(bags: list[list[int]]) -> Tensor:
    return torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)


def lengths_of(*columns: list[list[int]]) -> Tensor:
    return torch.tensor([len(bag) for bags in columns for bag in bags], dtype=torch.int32)


def offsets_of(*columns: list[list[int]]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths_of(*columns).long().cumsum(0)])


def shared(bags: Bags) -> tuple[Any, ...]:
    return flat(bags["seen"]), flat(bags["visited"]), lengths_of(bags["seen"])


def two_jagged(bags: Bags) -> tuple[Any, ...]:
    return tuple(JaggedTensor(flat(bags[key]), lengths=lengths_of(bags[key])) for key in KEYS)


def one_offsets(bags: Bags) -> tuple[Any, ...]:
    return flat([*bags["seen"], *bags["visited"]]), offsets_of(bags["seen"], bags["visited"])


def two_offsets(bags: Bags) -> tuple[Any, ...]:
    return tuple(make(bags[key]) for key in KEYS for make in (flat, offsets_of))


def two_lengths(bags: Bags) -> tuple[Any, ...]:
    return tuple(make(bags[key]) for key in KEYS for make in (flat, lengths_of))


SHARED: list[tuple[type[Any], Callable[[Bags], tuple[Any, ...]]]] = [
    (JoinedLengths, shared),
    (RepeatedLengths, shared),
    (RepeatedLengthsPooled, shared),
    (LengthsOfTheOther, two_jagged),
]
OWN: list[tuple[type[Any], Callable[[Bags], tuple[Any, ...]]]] = [
    (OffsetsOfAll, one_offsets),
    (OffsetsOfAllPooled, one_offsets),
    (OffsetsByKey, two_offsets),
    (OwnDifferences, two_offsets),
    (LengthsOfEach, two_lengths),
]


def drawn(samples: int, seed: int, *, alike: bool) -> dict[str, list[list[int]]]:
    random = np.random.default_rng((seed, samples))
    counts = random.integers(0, LONGEST, samples)
    every = {key: counts if alike or key == "seen" else random.integers(0, LONGEST, samples) for key in KEYS}
    return {key: [random.integers(1, 40, count).tolist() for count in column] for key, column in every.items()}


@pytest.mark.parametrize(
    ("kind", "call", "alike"),
    one_in(
        3,
        [
            pytest.param(kind, call, alike, id=kind.__name__)
            for alike, kinds in ((True, SHARED), (False, OWN))
            for kind, call in kinds
        ],
    ),
)
def test_lengths_made_by_a_forward_are_those_of_the_request(
    kind: type[Any], call: Callable[[Bags], tuple[Any, ...]], alike: bool, tmp_path: Path
) -> None:
    """Alone and merged: empty, of one sample, longer than the example, differing between keys."""
    torch.manual_seed(0)
    module = kind().eval()
    example = drawn(5, 0, alike=alike or kind is LengthsOfEach)
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=call(example))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert not part.mixes_samples, part.mixed_by
        assert [{*group} for group in part.together] == ([{*KEYS}] if alike else [])
        requests: list[Bags] = [drawn(n, seed, alike=alike) for n, seed in ((1, 1), (1, 2), (3, 1), (9, 4))]
        requests += [{key: [[], []] for key in KEYS}, {key: [[7]] for key in KEYS}]
        expected = [answer_of_call(module, call(bags)) for bags in requests]
        for bags, right in zip(requests, expected, strict=True):
            assert_close(engine.score(bags), right)
        merged = engine.answer(
            [accept(engine.schema, replace(encode(bags), outputs=["scores"])) for bags in requests]
        ).outcomes()
        for result, right in zip(merged, expected, strict=True):
            assert isinstance(result, Mapping), result
            assert_close(result, right)
        if alike:
            check_refused(
                engine, [{"seen": [[1, 2], [3]], "visited": [[4], [5, 6]]}, {"seen": [[1]], "visited": [[]]}]
            )


def check_refused(engine: Engine, requests: Sequence[Bags]) -> None:
    for bags in requests:
        with pytest.raises(InvalidRequest, match=r"expected as many ids as '.*' has in each sample"):
            engine.score(bags)
