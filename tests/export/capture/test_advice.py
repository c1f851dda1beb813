"""What cannot be served says in one line what to change, and where; and is served once that is done."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT

DIM, LONGEST = 8, 6


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingConfig(name="t", num_embeddings=40, embedding_dim=DIM, feature_names=["seen"])
        self.rows = EmbeddingCollection(tables=[config])
        self.gru, self.top = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, 1)


class LoopOverSamples(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        padded = self.rows(ids)["seen"].to_padded_dense(LONGEST)
        return torch.stack([self.top(padded[sample].sum(0)) for sample in range(padded.size(0))])


class LoopOverRows(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        padded = self.rows(ids)["seen"].to_padded_dense(LONGEST)
        return torch.stack([self.top(value.sum(0)) for value in padded])


class LoopOverLengths(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history, first, result = self.rows(ids)["seen"], 0, []
        for length in history.lengths().tolist():
            result.append(history.values()[first : first + length].sum(0))
            first += length
        answer: Tensor = self.top(torch.stack(result))
        return answer


class LoopWithEmpty(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        padded = history.to_padded_dense(LONGEST)
        mask = torch.arange(LONGEST) < history.lengths().unsqueeze(1)
        last = torch.zeros(padded.size(0), DIM)
        for sample in range(padded.size(0)):
            valid_positions = mask[sample].nonzero().squeeze(1)
            if valid_positions.numel() > 0:
                last[sample] = padded[sample, valid_positions[-1]]
        answer: Tensor = self.top(last)
        return answer


class AllAtOnce(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        padded, lengths = history.to_padded_dense(LONGEST), history.lengths().long()
        last = padded[torch.arange(padded.size(0)), (lengths - 1).clamp(min=0)]
        answer: Tensor = self.top(last * (lengths > 0).unsqueeze(1))
        return answer


class BranchOnSome(Rows):
    """It is no loop over samples, but asks how many there are."""

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        total = history.to_padded_dense(LONGEST).sum(1)
        for count in range(LONGEST):
            valid_positions = (history.lengths() == count).nonzero().squeeze(1)
            if valid_positions.numel() > 0:
                total[valid_positions] = total[valid_positions] * count
        answer: Tensor = self.top(total)
        return answer


class WithoutBranch(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        total = history.to_padded_dense(LONGEST).sum(1)
        for count in range(LONGEST):
            valid_positions = (history.lengths() == count).nonzero().squeeze(1)
            total[valid_positions] = total[valid_positions] * count
        answer: Tensor = self.top(total)
        return answer


class Mapped(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        padded = self.rows(ids)["seen"].to_padded_dense(LONGEST)
        answer: Tensor = torch.vmap(lambda rows: (rows @ rows.T).sum())(padded)
        return answer


class Multiplied(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        padded = self.rows(ids)["seen"].to_padded_dense(LONGEST)
        answer: Tensor = (padded @ padded.transpose(1, 2)).sum((1, 2))
        return answer


class Packed(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        packed = nn.utils.rnn.pack_padded_sequence(
            history.to_padded_dense(LONGEST),
            history.lengths().clamp(min=1).cpu(),
            batch_first=True,
            enforce_sorted=False,
        )
        answer: Tensor = self.top(self.gru(packed)[1][-1])
        return answer


class Padded(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        output, _ = self.gru(history.to_padded_dense(LONGEST))
        last = (history.lengths().long() - 1).clamp(min=0)
        answer: Tensor = self.top(output[torch.arange(output.size(0)), last])
        return answer


class FlatTimes(Rows):
    def forward(self, ids: KeyedJaggedTensor, times: Tensor) -> Tensor:
        history = self.rows(ids)["seen"]
        moved = JaggedTensor(history.values() * times.unsqueeze(1), lengths=history.lengths())
        answer: Tensor = self.top(moved.to_padded_dense(LONGEST).sum(1))
        return answer


class JaggedTimes(Rows):
    def forward(self, ids: KeyedJaggedTensor, times: JaggedTensor) -> Tensor:
        history = self.rows(ids)["seen"]
        moved = JaggedTensor(history.values() * times.values().unsqueeze(1), lengths=history.lengths())
        answer: Tensor = self.top(moved.to_padded_dense(LONGEST).sum(1))
        return answer


class TokensOfNoTable(Rows):
    """A key of the request is read by an nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, DIM, padding_idx=0)

    def forward(self, both: KeyedJaggedTensor) -> Tensor:
        total = self.rows(both)["seen"].to_padded_dense(LONGEST).sum(1)
        tokens = both["history_tokens"].to_padded_dense(LONGEST)
        answer: Tensor = self.top(total + self.words(tokens.long()).sum(1))
        return answer


class PaddedTokens(TokensOfNoTable):
    def forward(self, ids: KeyedJaggedTensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        total = self.rows(ids)["seen"].to_padded_dense(LONGEST).sum(1)
        answer: Tensor = self.top(total + self.words(tokens).sum(1))
        return answer


class Masked(Rows):
    def forward(self, padded: Tensor) -> Tensor:
        mask = padded != 0
        ids = KeyedJaggedTensor(["seen"], padded[mask], lengths=mask.sum(1).int())
        answer: Tensor = self.top(self.rows(ids)["seen"].to_padded_dense(LONGEST).sum(1))
        return answer


class DenseLengths(Rows):
    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        ids = KeyedJaggedTensor.from_jt_dict({"seen": JaggedTensor.from_dense_lengths(padded, lengths)})
        answer: Tensor = self.top(self.rows(ids)["seen"].to_padded_dense(LONGEST).sum(1))
        return answer


class Parts(Rows):
    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        ids = KeyedJaggedTensor(["seen"], values, lengths=lengths)
        answer: Tensor = self.top(self.rows(ids)["seen"].to_padded_dense(LONGEST).sum(1))
        return answer


ONE_BY_ONE = "loops over samples or ids at .*test_advice.py, line .*: `.*`: .*all of them at once"
BEFORE = "itself at .*test_advice.py, line .*: apply masks to padded ids before the model"
ADVISED: list[tuple[type[Rows], str, type[Rows]]] = [
    (LoopOverSamples, ONE_BY_ONE, AllAtOnce),
    (LoopOverRows, ONE_BY_ONE, AllAtOnce),
    (LoopOverLengths, ONE_BY_ONE, AllAtOnce),
    (LoopWithEmpty, ONE_BY_ONE, AllAtOnce),
    (BranchOnSome, "depends on numbers .*test_advice.py, line .*: remove the branch if its steps", WithoutBranch),
    (Mapped, "maps a function by torch.vmap at .*test_advice.py, line .*: .*torch.matmul", Multiplied),
    (Packed, r"packs sequences at .*test_advice.py, line .*output\[torch.arange\(B\), lengths - 1\]", Padded),
    (
        FlatTimes,
        "at .*test_advice.py, line .*'times' stays .*each id of 'seen', give it as a JaggedTensor",
        JaggedTimes,
    ),
    (TokensOfNoTable, r"uses 'history_tokens', .*a tensor \[B, n\] that .*before the model", PaddedTokens),
    (Masked, BEFORE, Parts),
    (DenseLengths, BEFORE, Parts),
]


def bags_of(samples: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng((seed, samples))
    return [random.integers(1, 40, count).tolist() for count in random.integers(0, LONGEST, samples)]


def call_of(kind: type[Rows], bags: list[list[int]]) -> dict[str, Any]:
    """The arguments that a forward takes."""
    values = torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    times = values.float().sqrt()
    tokens = [bag[: 1 + number % 3] * 2 for number, bag in enumerate(bags)]
    both = [value for bag in (*bags, *tokens) for value in bag]
    of_both = torch.tensor([len(bag) for bag in (*bags, *tokens)], dtype=torch.int32)
    every = {
        "ids": KeyedJaggedTensor(["seen"], values, lengths=lengths),
        "times": JaggedTensor(times, lengths=lengths) if kind is JaggedTimes else times,
        "both": KeyedJaggedTensor(["seen", "history_tokens"], torch.tensor(both), lengths=of_both),
        "tokens": torch.tensor([bag + [0] * (LONGEST - len(bag)) for bag in tokens]),
        "values": values,
        "lengths": lengths,
        "padded": torch.tensor([bag + [0] * (LONGEST - len(bag)) for bag in bags]),
    }
    return {name: every[name] for name in inspect.signature(kind.forward).parameters if name != "self"}


@pytest.mark.parametrize(
    ("kind", "why"), one_in(3, [pytest.param(kind, why, id=kind.__name__) for kind, why, _ in ADVISED])
)
def test_a_refusal_says_what_to_change_and_where(kind: type[Rows], why: str, tmp_path: Path) -> None:
    bags = bags_of(6)
    with torch.no_grad():
        kind().eval()(**call_of(kind, bags))
    with pytest.raises(ModelError, match=f"^{kind.__name__}: .*{why}"):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=call_of(kind, bags))
    assert not (tmp_path / "r" / "m").exists()


@pytest.mark.parametrize("kind", one_in(4, dict.fromkeys(advised for _, _, advised in ADVISED)))
def test_a_model_changed_as_advised_is_served(kind: type[Rows], tmp_path: Path) -> None:
    module = kind().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=call_of(kind, bags_of(6)))
    with Engine.open(bundle) as engine, torch.no_grad():
        requests: list[list[list[int]]] = [bags_of(1), bags_of(4, 1), [[], []], [[7]]]
        for bags in requests:
            call = call_of(kind, bags)
            dense = {"times": lambda leaf: leaf.values().numpy(), "tokens": lambda leaf: leaf.numpy()}
            inputs: Mapping[str, Any] = {name: dense[name](call[name]) for name in dense.keys() & call.keys()}
            np.testing.assert_allclose(
                engine.score({"seen": bags}, inputs)["scores"], module(**call).numpy(), atol=1e-5
            )
