"""Sequences in which samples meet, or not: read off the graph, and as merged requests and those alone answer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec import KeyedJaggedTensor as Keyed

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from serving.requests.accept import accept
from serving.requests.encoding import encode
from tests.models.inputs import DIM, ROWS, ids
from tests.support.module_calls import answer_of_call, assert_close, request_of_call
from tests.support.scored_models import EXACT
from tests.support.sequence_models import sequences

LONGEST = 6
Rows = Mapping[str, JaggedTensor]


class OfRows(nn.Module):
    """Its answer, a number for each sample, is made by a function of what its collection answers."""

    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = sequences(ROWS)
        self.layer = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.of_batch = nn.BatchNorm1d(DIM, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(DIM)
        self.of_row = nn.LayerNorm(DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.positions = nn.Embedding(2000, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.make = make

    def forward(self, keyed: Keyed) -> Tensor:
        answer: Tensor = self.make(self, self.rows(keyed), keyed)
        return answer


def padded(rows: Tensor, of: JaggedTensor, longest: Any = LONGEST) -> Tensor:
    answer: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(rows, [of.offsets()], [longest], 0.0)
    return answer


def total(rows: Tensor, of: JaggedTensor) -> Tensor:
    return padded(rows, of).sum(dim=1)


# -- apart


def padded_dense(_: Any, rows: Rows, __: Keyed) -> Any:
    return rows["seen"].to_padded_dense(LONGEST).sum(dim=1)


def a_layer_over_rows(self: Any, rows: Rows, _: Keyed) -> Any:
    return total(self.layer(rows["seen"].values()).relu(), rows["seen"])


def normed_rows(self: Any, rows: Rows, _: Keyed) -> Any:
    return total(self.of_row(self.norm(rows["seen"].values())), rows["seen"])


def softmax_over_columns(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values().softmax(dim=1), rows["seen"])


def dense_and_back(_: Any, rows: Rows, __: Keyed) -> Any:
    history = rows["seen"]
    back = torch.ops.fbgemm.dense_to_jagged(history.to_padded_dense(LONGEST) * 2, [history.offsets()])[0]
    return total(back + history.values(), history)


def mean_by_lengths(_: Any, rows: Rows, __: Keyed) -> Any:
    history = rows["seen"]
    return total(history.values(), history) / history.lengths().clamp(min=1).unsqueeze(1)


def two_keys(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values(), rows["seen"]) * total(rows["visited"].values(), rows["visited"])


def by_ids(_: Any, rows: Rows, keyed: Keyed) -> Any:
    return total(rows["seen"].values() * (keyed["seen"].values() % 3).unsqueeze(1), rows["seen"])


def by_positions(self: Any, rows: Rows, _: Keyed) -> Any:
    there = rows["seen"].to_padded_dense(LONGEST)
    return (there * self.positions(torch.arange(LONGEST))).sum(dim=1)


def lengths_alone(self: Any, rows: Rows, _: Keyed) -> Any:
    return self.positions(rows["visited"].lengths())


def convolved(self: Any, rows: Rows, _: Keyed) -> Any:
    there = rows["seen"].to_padded_dense(LONGEST).transpose(1, 2)
    return self.conv(there).amax(dim=2)


def rows_twice(_: Any, rows: Rows, __: Keyed) -> Any:
    values = rows["seen"].values()
    return total(torch.cat([values, values * 2], dim=1)[:, DIM:], rows["seen"])


def attended(_: Any, rows: Rows, __: Keyed) -> Any:
    there = rows["seen"].to_padded_dense(LONGEST)
    mask = torch.arange(LONGEST) < rows["seen"].lengths().unsqueeze(1)
    scores = torch.bmm(there, there.transpose(1, 2)).masked_fill(~mask.unsqueeze(1), -1e9)
    return torch.bmm(scores.softmax(dim=2), there).sum(dim=1)


# -- samples meet


def softmax_over_all_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values().softmax(dim=0), rows["seen"])


def cumsum_over_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values().cumsum(dim=0), rows["seen"])


def less_the_mean(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values() - rows["seen"].values().mean(dim=0), rows["seen"])


def over_their_number(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values() / rows["seen"].values().size(0), rows["seen"])


def offsets_of_another_key(_: Any, rows: Rows, __: Keyed) -> Any:
    values = torch.cat([rows["seen"].values(), torch.zeros(4000, DIM)])
    return padded(values, rows["visited"]).sum(dim=1)


def lengths_of_another_key(_: Any, rows: Rows, __: Keyed) -> Any:
    lengthened = JaggedTensor(
        rows["seen"].values(), lengths=rows["visited"].lengths().clamp(max=0) + rows["seen"].lengths()
    )
    return lengthened.to_padded_dense(LONGEST).sum(dim=1)


def shorter_lengths(_: Any, rows: Rows, __: Keyed) -> Any:
    shortened = JaggedTensor(rows["seen"].values(), lengths=rows["seen"].lengths().clamp(max=2))
    return shortened.to_padded_dense(LONGEST).sum(dim=1)


def lengths_by_bool(_: Any, rows: Rows, __: Keyed) -> Any:
    jagged = JaggedTensor(rows["seen"].values(), lengths=rows["seen"].lengths().bool().int())
    return jagged.to_padded_dense(LONGEST).sum(dim=1)


def lengths_by_byte(_: Any, rows: Rows, __: Keyed) -> Any:
    jagged = JaggedTensor(rows["seen"].values(), lengths=rows["seen"].lengths().to(torch.uint8).int())
    return jagged.to_padded_dense(LONGEST).sum(dim=1)


def rolled_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values().roll(1, 0), rows["seen"])


def flipped_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values().flip(0), rows["seen"])


def sorted_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values().sort(dim=0).values, rows["seen"])


def shifted_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    values = rows["seen"].values()
    return total(values - torch.cat([values[:1], values[:-1]]), rows["seen"])


def the_longest_of_all(_: Any, rows: Rows, __: Keyed) -> Any:
    return rows["seen"].to_padded_dense(LONGEST).sum(dim=1) / rows["seen"].lengths().max().clamp(min=1)


def as_long_as_there_are_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    history = rows["seen"]
    return padded(history.values(), history, history.values().size(0)).mean(dim=1)


def positions_over_all_rows(self: Any, rows: Rows, _: Keyed) -> Any:
    values = rows["seen"].values()
    return total(values + self.positions(torch.arange(values.size(0))), rows["seen"])


def normed_by_all_rows(self: Any, rows: Rows, _: Keyed) -> Any:
    return total(self.of_batch(rows["seen"].values()), rows["seen"])


def normed_as_one(self: Any, rows: Rows, _: Keyed) -> Any:
    return total(self.instance(rows["seen"].values().t().unsqueeze(0)).squeeze(0).t(), rows["seen"])


def convolved_over_all_rows(self: Any, rows: Rows, _: Keyed) -> Any:
    return total(self.conv(rows["seen"].values().t().unsqueeze(0)).squeeze(0).t(), rows["seen"])


def a_network_over_all_rows(self: Any, rows: Rows, _: Keyed) -> Any:
    return total(self.gru(rows["seen"].values().unsqueeze(0))[0].squeeze(0), rows["seen"])


def first_of_each(_: Any, rows: Rows, __: Keyed) -> Any:
    """By places in all rows, made of offsets. An empty sample has the first row of the next one."""
    history = rows["seen"]
    values = torch.cat([history.values(), torch.zeros(1, DIM)])
    return values[history.offsets()[:-1]]


def offsets_as_numbers(_: Any, rows: Rows, __: Keyed) -> Any:
    history = rows["seen"]
    return total(history.values(), history) + history.offsets()[:-1].unsqueeze(1)


def large_offsets_as_numbers(_: Any, rows: Rows, __: Keyed) -> Any:
    """No probe of an export has so many ids. Many requests together have."""
    history = rows["seen"]
    return total(history.values(), history) + (history.offsets()[:-1] > 300).float().unsqueeze(1)


def many_rows_as_numbers(_: Any, rows: Rows, __: Keyed) -> Any:
    history = rows["seen"]
    some = torch.full((LONGEST,), history.values().size(0)) > 300
    return (history.to_padded_dense(LONGEST) * (1 + some.float().unsqueeze(1))).sum(dim=1)


def attention_over_all_rows(_: Any, rows: Rows, __: Keyed) -> Any:
    values = rows["seen"].values()
    return total((values @ values.t()).softmax(dim=1) @ values, rows["seen"])


def target_of_all(_: Any, rows: Rows, __: Keyed) -> Any:
    return total(rows["seen"].values() * rows["target"].values().sum(dim=0), rows["seen"])


def zeros_of_two_keys(_: Any, rows: Rows, __: Keyed) -> Any:
    history, visited = rows["seen"], rows["visited"]
    some = torch.zeros(history.values().size(0) + visited.values().size(0), DIM) + 1
    return total(history.values() + some.sum(dim=0), history)


APART: tuple[Callable[..., Any], ...] = (
    padded_dense, a_layer_over_rows, normed_rows, softmax_over_columns, dense_and_back, mean_by_lengths, two_keys,
    by_ids, by_positions, lengths_alone, convolved, rows_twice, attended,
)  # fmt: skip
MEETING: tuple[Callable[..., Any], ...] = (
    softmax_over_all_rows, cumsum_over_rows, less_the_mean, over_their_number, offsets_of_another_key,
    lengths_of_another_key, shorter_lengths, lengths_by_bool, lengths_by_byte, rolled_rows, flipped_rows, sorted_rows,
    the_longest_of_all, as_long_as_there_are_rows, positions_over_all_rows, normed_by_all_rows,
    normed_as_one, convolved_over_all_rows, a_network_over_all_rows, first_of_each, offsets_as_numbers,
    large_offsets_as_numbers, many_rows_as_numbers, attention_over_all_rows, target_of_all, zeros_of_two_keys,
)  # fmt: skip


# What stays in `make test`: each kind once.
SHORT = (
    padded_dense, dense_and_back, by_ids, softmax_over_all_rows, lengths_by_byte, large_offsets_as_numbers,
)  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=make.__name__, marks=() if make in SHORT else pytest.mark.long)
        for make in (*APART, *MEETING)
    ],
)
def test_samples_meet_or_not_and_never_in_silence(tmp_path: Path, make: Callable[..., Tensor]) -> None:
    module = OfRows(make).eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=(example(0, 6),))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert part.mixes_samples == (make in MEETING), part.mixed_by
        requests = [example(seed, samples) for seed, samples in enumerate((3, 1, 40, 2, 90, 8))]
        features = [request_of_call(module, (request,))[0] for request in requests]
        tensors = [encode(feature, outputs=["scores"]) for feature in features]
        together = engine.answer([accept(engine.schema, tensor) for tensor in tensors]).outcomes()
        for request_example, asking, merged in zip(requests, features, together, strict=True):
            right = answer_of_call(module, (request_example,))
            assert_close(engine.score(asking), right)
            assert isinstance(merged, Mapping)
            assert_close(merged, right)


def test_a_size_that_torch_compares_is_refused_by_its_line(tmp_path: Path) -> None:
    """Whether there are two rows, of which one is left, would be another case of broadcasting."""
    with pytest.raises(ModelError, match=r"the number of ids at .*line \d+: `return total\(values - torch.cat"):
        export_model(OfRows(shifted_rows).eval(), tmp_path / "r", "m", EXACT, example=(example(0, 6),))


def example(seed: int, samples: int) -> Keyed:
    return ids(np.random.default_rng(seed), samples, "seen", "target", "visited", most=LONGEST)
