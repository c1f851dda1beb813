"""Numbers by id in random graphs: whose ids they go with follows from the graph, never from the example's lengths.

All histories of half of the examples have as many ids. What is served, with other lengths in every key, is what the
module itself answers; or the export refuses the numbers by name.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export import export_model
from export.capture.stub_collections import Columns
from export.errors import ModelError
from export.scores.trace_example import trace_example
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.models import Spec
from tests.support.module_calls import answer_of_call, assert_close
from tests.support.scored_models import EXACT
from tests.support.sequence_models import sequences

DIM, LONGEST = 4, 5
KEYS = ("views", "carts", "likes")
TABLES = tuple(Spec(f"t_{key}", 40, DIM, "NONE", (key,)) for key in KEYS)
Lengths = Mapping[str, list[int]]


def padded(values: Tensor, offsets: Tensor) -> Tensor:
    answer: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [LONGEST], 0.0)
    return answer


# What numbers and rows of their key are made into, [B, DIM]: by the graph, one belongs to the other.
def by_rows(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    return padded(rows.values() * of.values().unsqueeze(1), rows.offsets()).sum(1)


def by_own_offsets(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    return padded(rows.values() * of.values().unsqueeze(1), of.offsets()).amax(1)


def by_position(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    return cast(Tensor, (rows.to_padded_dense(LONGEST) * of.to_padded_dense(LONGEST).unsqueeze(-1)).sum(1))


def by_softmax(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    weights = of.to_padded_dense(LONGEST).softmax(1).view(-1, 1, LONGEST)
    return torch.bmm(weights, rows.to_padded_dense(LONGEST)).squeeze(1)


def by_flat_view(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    weights = nn.functional.gelu(of.to_padded_dense(LONGEST).reshape(-1, 1)).view(-1, LONGEST)
    answer: Tensor = rows.to_padded_dense(LONGEST).transpose(1, 2) @ weights.unsqueeze(2)
    return answer.squeeze(2)


def by_einsum(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    return torch.einsum("bl,bld->bd", of.to_padded_dense(LONGEST), rows.to_padded_dense(LONGEST))


def by_columns(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    both = torch.cat([of.to_padded_dense(LONGEST).unsqueeze(2), rows.to_padded_dense(LONGEST)], 2)
    return both.relu().sum(1)[:, 1:]


def by_offsets_of_rows(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    by_sample: Tensor = rows.to_padded_dense(LONGEST).sum(1)
    answer: Tensor = by_sample * padded(of.values().unsqueeze(1), rows.offsets()).sum(1)
    return answer


def by_index(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    samples = torch.repeat_interleave(torch.arange(of.lengths().shape[0]), of.lengths())
    return torch.zeros(of.lengths().shape[0], DIM).index_add(0, samples, rows.values() * of.values().unsqueeze(1))


def by_segment(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    sums = torch.segment_reduce(of.values(), "sum", lengths=rows.lengths().long(), unsafe=True, initial=0.0)
    by_sample: Tensor = rows.to_padded_dense(LONGEST).sum(1)
    answer: Tensor = by_sample * sums.unsqueeze(1)
    return answer


def by_mean(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    counts: Tensor = of.lengths().clamp(min=1).unsqueeze(1)
    return by_position(rows, of) / counts


# Nothing says whose they are: that the example has as many is a coincidence.
def alone(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    by_sample: Tensor = rows.to_padded_dense(LONGEST).sum(1)
    answer: Tensor = by_sample * of.to_padded_dense(LONGEST).sum(1, keepdim=True)
    return answer


def last(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    last_position = (of.lengths().long() - 1).clamp(min=0).unsqueeze(1)
    by_sample: Tensor = rows.to_padded_dense(LONGEST).sum(1)
    answer: Tensor = by_sample * of.to_padded_dense(LONGEST).gather(1, last_position)
    return answer


def in_another_order(rows: JaggedTensor, of: JaggedTensor) -> Tensor:
    return cast(Tensor, (rows.to_padded_dense(LONGEST) * of.to_padded_dense(LONGEST).flip(1).unsqueeze(-1)).sum(1))


TIED = (
    by_rows, by_own_offsets, by_position, by_softmax, by_flat_view, by_einsum, by_columns, by_offsets_of_rows, by_index,
    by_segment, by_mean,
)  # fmt: skip
UNTIED = (alone, last, in_another_order)


class Shop(nn.Module):
    """Histories, and numbers for the ids of some of them: `ways` says by name of the key, and how."""

    def __init__(self, ways: Mapping[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.ways, self.out = sequences(TABLES), ways, nn.Linear(DIM * (len(ways) + 1), 2)

    def forward(self, keyed: KeyedJaggedTensor, numbers: dict[str, JaggedTensor]) -> Tensor:
        rows = self.rows(keyed)
        parts = [sum(rows[key].to_padded_dense(LONGEST).sum(1) for key in KEYS)]
        parts += [way(rows[key], numbers[f"of_{key}"]) for key, way in self.ways.items()]
        answer: Tensor = self.out(torch.cat(parts, 1))
        return answer


def call(lengths: Lengths, ways: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Ids, numbers as the engine takes them, and the arguments of the module."""
    random = np.random.default_rng(seed)
    ids = {key: random.integers(0, 40, sum(counts)) for key, counts in lengths.items()}
    numbers = {f"of_{key}": random.standard_normal(sum(lengths[key])).astype(np.float32) for key in ways}
    as_tensor = {key: torch.tensor(counts, dtype=torch.int32) for key, counts in lengths.items()}
    keyed = KeyedJaggedTensor(
        list(KEYS),
        torch.from_numpy(np.concatenate([ids[key] for key in KEYS])),
        lengths=torch.cat([as_tensor[key] for key in KEYS]),
    )
    jagged = {
        name: JaggedTensor(torch.from_numpy(number), lengths=as_tensor[name.removeprefix("of_")].clone())
        for name, number in numbers.items()
    }
    features = {key: (ids[key], as_tensor[key].numpy()) for key in KEYS}
    return features, {f"numbers.{name}": number for name, number in numbers.items()}, (keyed, jagged)


def drawn(random: np.random.Generator, samples: int, *, are_equal: bool) -> Lengths:
    if are_equal:
        counts = random.integers(1, LONGEST + 1, samples).tolist()
        return dict.fromkeys(KEYS, counts)
    return {key: random.integers(0, LONGEST + 1, samples).tolist() for key in KEYS}


def check(seed: int, folder: Path) -> bool:
    """Whether the model of a seed is served."""
    random = np.random.default_rng(seed)
    keys = random.permutation(KEYS)[: random.integers(1, 4)].tolist()
    ways: dict[str, Any] = {}
    for key in keys:
        some = UNTIED if random.random() < 0.15 else TIED
        ways[key] = some[random.integers(0, len(some))]
    module = Shop(ways).eval()
    example = call(drawn(random, 5, are_equal=seed % 2 == 0), ways, seed)[2]
    if untied := "|".join(key for key, way in ways.items() if way in UNTIED):
        with pytest.raises(
            ModelError, match=rf"uses 'numbers\.of_({untied})', which no collection looks up, and it is"
        ):
            export_model(module, folder / "r", "m", EXACT, example=example)
        return False
    bundle = export_model(module, folder / "r", "m", EXACT, example=example)
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert {dense_input.name: dense_input.key for dense_input in part.inputs} == {
            f"numbers.of_{key}": key for key in keys
        }
        for samples in (1, 2, 3, 8):
            features, dense, arguments = call(drawn(random, samples, are_equal=False), ways, samples)
            assert_close(engine.score(features, dense), answer_of_call(module, arguments))
    return True


@pytest.mark.parametrize("seed", one_in(3, range(3)))
def test_random_models_are_served_correctly_or_refused_by_name(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.long
def test_random_models(tmp_path: Path) -> None:
    count = int(os.environ.get("RANDOM_MODELS", "3"))
    served = [check(seed, tmp_path / str(seed)) for seed in range(3, 3 + count)]
    assert any(served)


@pytest.mark.parametrize(
    ("way", "are_equal"),
    one_in(3, [*((way, True) for way in (*TIED, *UNTIED)), (by_rows, False), (by_position, False), (alone, False)]),
)
def test_the_key_of_per_id_numbers_is_found_or_unknown(way: Any, are_equal: bool) -> None:
    """Also where all keys of the example have equal lengths."""
    module = Shop({"carts": way}).eval()
    lengths = drawn(np.random.default_rng(7), 5, are_equal=are_equal)
    collections = {module.rows: Columns(KEYS, KEYS, KEYS, [DIM] * len(KEYS), [])}
    followed = trace_example(module, collections, call(lengths, {"carts": way}, 7)[2])
    assert followed.signature.numbers == ({"numbers.of_carts": "carts"} if way in TIED else {})


class Both(Shop):
    """The prices are put beside the rows of two keys at once."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: dict[str, JaggedTensor]) -> Tensor:
        rows = self.rows(keyed)
        both = sum(rows[key].to_padded_dense(LONGEST) for key in ("views", "carts"))
        prices = numbers["of_carts"].to_padded_dense(LONGEST)
        answer: Tensor = self.out((both * prices.unsqueeze(-1)).sum(1).repeat(1, 2))
        return answer


class Crossed(Shop):
    """The prices of carts are found by the lengths of views."""

    def forward(self, keyed: KeyedJaggedTensor, numbers: dict[str, JaggedTensor]) -> Tensor:
        rows = self.rows(keyed)
        views = padded(numbers["of_carts"].values().unsqueeze(1), rows["views"].offsets()).sum(1)
        answer: Tensor = self.out(views.repeat(1, 2 * DIM))
        return answer


@pytest.mark.parametrize(
    ("kind", "are_equal", "why"),
    [
        (Both, True, "it is combined with rows of 'carts' and of 'views': requests"),
        (Crossed, False, "it is combined with rows of 'views', and the example has more or fewer of these: requests"),
    ],
)
def test_numbers_of_more_than_one_key_are_refused_with_the_reason(
    kind: type[Shop], are_equal: bool, why: str, tmp_path: Path
) -> None:
    ways = {"carts": by_rows}
    lengths = drawn(np.random.default_rng(7), 5, are_equal=are_equal)
    counts = {**lengths, "views": [*reversed(lengths["carts"])]} if not are_equal else lengths
    with pytest.raises(ModelError, match=why):
        export_model(kind(ways).eval(), tmp_path / "r", "m", EXACT, example=call(counts, ways, 7)[2])
