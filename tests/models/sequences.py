"""Models of sequences: what becomes of the rows and lengths that an EmbeddingCollection answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.models.inputs import DIM, POOLED, ROWS, WIDTH, Example, NamedModel, dense, ids, numbers, of, positional
from tests.support.managed_collision import collection_behind, mch, trained
from tests.support.managed_collision import kjt_of as kjt_of_raw
from tests.support.models import Spec, collection
from tests.support.sequence_models import sequences

LONGEST = 6
RAW = (Spec("page", 40, DIM, "NONE", ("pages",)),)


class Rows(nn.Module):
    """One table of rows is read by two features, another by one; their sequences differ in length."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences(ROWS)
        self.top = nn.Linear(DIM, 1)


class MeanOfPadded(Rows):
    """`to_padded_dense(longest)`, and the mean over positions that are there: a mask by lengths."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        padded, lengths = history.to_padded_dense(LONGEST), history.lengths()
        mask = torch.arange(LONGEST, device=lengths.device).unsqueeze(0) < lengths.unsqueeze(1)
        total = (padded * mask.unsqueeze(-1).float()).sum(dim=1)
        answer: Tensor = self.top(total / lengths.clamp(min=1).unsqueeze(1))
        return answer


class OwnLongest(Rows):
    """`to_padded_dense()`, as long as the longest of the batch; HSTU takes `lengths.max()`."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        return self.top(history.to_padded_dense().sum(dim=1)).squeeze(1)  # type: ignore[no-any-return]


class NormsOfPadded(Rows):
    """TorchEasyRec's Dice: BatchNorm over all positions, up to the longest sequence of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.plain = nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM, affine=False)
        for norm in (self.norm, self.plain):
            norm.running_mean = torch.rand(DIM)
            norm.running_var = torch.rand(DIM) + 0.5

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        padded = self.rows(keyed)["seen"].to_padded_dense()
        flat = padded.reshape(-1, DIM)
        gate = self.norm(flat).sigmoid() + self.plain(flat)
        return self.top((gate.view(padded.shape) * padded).sum(dim=1)).squeeze(1)  # type: ignore[no-any-return]


class LongestOfLengths(Rows):
    """HSTU: the longest sequence is an integer that the forward reads off."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        longest = int(history.lengths().max().item())
        padded = torch.ops.fbgemm.jagged_to_padded_dense(history.values(), [history.offsets()], [longest], 0.0)
        answer: Tensor = self.top(padded.sum(dim=1))
        return answer


class JaggedToDense(Rows):
    """BERT4Rec's history: fbgemm's jagged_2d_to_dense, viewed anew, for each key of the request."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        padded = [
            torch.ops.fbgemm.jagged_2d_to_dense(
                values=rows[key].values(), offsets=rows[key].offsets(), max_sequence_length=LONGEST
            ).view(-1, LONGEST, DIM)
            for key in ("seen", "visited")
        ]
        answer: Tensor = self.top(torch.cat(padded, dim=1).amax(dim=1))
        return answer


class JaggedAndBack(Rows):
    """HSTU's blocks: dense to jagged and back, a layer over the rows, sums by segment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.SiLU())
        self.positions = nn.Parameter(torch.rand(LONGEST, DIM))

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        values, offsets = self.layer(history.values()), history.offsets()
        positions = self.positions.unsqueeze(0).expand(history.lengths().size(0), -1, -1)
        added = torch.ops.fbgemm.jagged_dense_elementwise_add_jagged_output(values, [offsets], positions)[0]
        dense = torch.ops.fbgemm.jagged_to_padded_dense(added, [offsets], [LONGEST], 0.0)
        again = torch.ops.fbgemm.dense_to_jagged(dense, [offsets])[0]
        answer: Tensor = self.top(torch.segment_reduce(again, "sum", lengths=history.lengths(), axis=0, initial=0.0))
        return answer


class SumOfRows(Rows):
    """Pooling by hand: `index_add_` by the sample of each row."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        sample = torch.repeat_interleave(torch.arange(history.lengths().numel()), history.lengths())
        total = torch.zeros(history.lengths().numel(), DIM).index_add_(0, sample, history.values())
        answer: Tensor = self.top(total)
        return answer


class Positions(Rows):
    """SASRec's and BERT4Rec's inputs: rows scaled, and an nn.Embedding of positions that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LONGEST, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        padded = self.rows(keyed)["seen"].to_padded_dense(LONGEST) * DIM**0.5
        indices = torch.arange(padded.size(1)).unsqueeze(0).expand(padded.size(0), -1)
        answer: Tensor = self.top(self.norm(padded + self.positions(indices))).squeeze(-1)
        return answer


class MaskOfIds(Rows):
    """BERT4Rec: which positions count is read off the ids themselves, where 0 fills up."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        real = keyed["seen"].to_padded_dense(desired_length=LONGEST) > 0
        padded = self.rows(keyed)["seen"].to_padded_dense(LONGEST)
        weights = padded.sum(dim=-1).masked_fill(~real, -1e9).softmax(dim=1)
        return torch.bmm(weights.unsqueeze(1), padded).squeeze(1)


class TwoSequences(Rows):
    """Sequences of different lengths, padded to different ones."""

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
        rows = self.rows(keyed)
        history, visited = rows["seen"].to_padded_dense(LONGEST), rows["visited"].to_padded_dense(4)
        return {"match": torch.bmm(history, visited.transpose(1, 2)).flatten(1), "seen": history}


class OneLength(Rows):
    """TorchEasyRec's sequence groups: several features of one event, joined by row before they are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.event = nn.Linear(2 * DIM, DIM)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        joined = self.event(torch.cat([rows["seen"].values(), rows["visited"].values()], dim=1))
        events = JaggedTensor(values=joined, lengths=rows["seen"].lengths())
        answer: Tensor = self.top(events.to_padded_dense(LONGEST).mean(dim=1))
        return answer


@dataclass
class Events:
    keyed: KeyedJaggedTensor
    prices: dict[str, JaggedTensor]


class Measured(Rows):
    """TorchEasyRec's `sequence_dense_features`: numbers for each event, a JaggedTensor beside the ids."""

    def forward(self, batch: Events) -> Tensor:
        history = self.rows(batch.keyed)["seen"].to_padded_dense(LONGEST)
        prices = batch.prices["seen_price"].to_padded_dense(LONGEST)
        return self.top((history * prices).sum(dim=1)).squeeze(1)  # type: ignore[no-any-return]


class Recurrent(Rows):
    """GRU4Rec and DIEN: a GRU over what is padded, and its state at the last event."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        states, _ = self.gru(history.to_padded_dense(LONGEST))
        last = (history.lengths().long() - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, DIM)
        answer: Tensor = self.top(states.gather(1, last).squeeze(1))
        return answer


class BesidePooled(Rows):
    """Pooled features, a sequence and dense inputs in one network."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED[:1])
        self.over = nn.Linear(2 * DIM + WIDTH, 1)

    def forward(self, keyed: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
        history = self.rows(keyed)["visited"].to_padded_dense(LONGEST).sum(dim=1)
        answer: Tensor = self.over(torch.cat([self.bags(keyed).values(), history, numbers], dim=1))
        return answer


class RawIds(nn.Module):
    """torchrec's zch example: raw ids behind managed collision, a row for each, scored."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = trained(collection_behind({"page": mch(40)}, RAW), keys=("pages",))
        self.top = nn.Linear(DIM, 1)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows, _ = self.rows(keyed)
        answer: Tensor = self.top(rows["pages"].to_padded_dense(LONGEST).sum(dim=1))
        return answer


class Answered(Rows):
    """torchrec's zch example: the forward answers the collection's dict of JaggedTensors itself, and None."""

    def forward(self, keyed: KeyedJaggedTensor) -> tuple[Any, None]:
        return self.rows(keyed), None


class ByCandidate(Rows):
    """HSTU: a score for each candidate of a user, as many as there are."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        history = rows["seen"].to_padded_dense(LONGEST).sum(dim=1)
        users = torch.repeat_interleave(history, rows["target"].lengths(), dim=0)
        scores: Tensor = (users * rows["target"].values()).sum(dim=1)
        return scores


class AllOfOneLength(Rows):
    """Histories that a loader cut to one length: rows of both keys as one tensor [B, 2L, dim], which is viewed."""

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        both = torch.cat([rows["seen"].values(), rows["visited"].values()]).view(2, keyed.stride(), LONGEST, DIM)
        return self.top(both.transpose(0, 1).flatten(1, 2).amax(dim=1))  # type: ignore[no-any-return]


def histories(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    return ids(random, samples, "seen", "target", "visited", most=LONGEST)


def not_empty(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    return ids(random, samples, "seen", "target", "visited", least=1, most=LONGEST)


def one_length(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    lengths = of(random, LONGEST + 1, samples).int()
    return ids(random, samples, "seen", "target", "visited", seen=lengths, visited=lengths)


def all_of_one_length(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    return ids(random, samples, "seen", "target", "visited", least=LONGEST, most=LONGEST)


def histories_and_pooled(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    return ids(random, samples, "user_id", "seen", "target", "visited", most=LONGEST)


def raw(random: np.random.Generator, samples: int) -> KeyedJaggedTensor:
    bags = [random.integers(-(2**40), 2**40, size).tolist() for size in random.integers(0, LONGEST + 1, samples)]
    return kjt_of_raw({"pages": bags})


def events(random: np.random.Generator, samples: int) -> Example:
    keyed = histories(random, samples)
    lengths = keyed["seen"].lengths()
    return (Events(keyed, {"seen_price": JaggedTensor(numbers(random, int(lengths.sum()), 1), lengths=lengths)}),)


OF_SEEN: dict[str, Callable[[], nn.Module]] = {
    "mean_of_padded": MeanOfPadded,
    "jagged_to_dense": JaggedToDense,
    "jagged_and_back": JaggedAndBack,
    "sum_of_rows": SumOfRows,
    "positions": Positions,
    "mask_of_ids": MaskOfIds,
    "two_sequences": TwoSequences,
    "recurrent": Recurrent,
    "sequences_answered": Answered,
    "score_by_candidate": ByCandidate,
}

SEQUENCES: dict[str, NamedModel] = {
    name: NamedModel(module, positional(histories)) for name, module in OF_SEEN.items()
} | {
    "longest_of_batch": NamedModel(OwnLongest, positional(not_empty)),
    "norms_of_longest": NamedModel(NormsOfPadded, positional(not_empty)),
    "longest_of_lengths": NamedModel(LongestOfLengths, positional(not_empty)),
    "sequences_of_one_length": NamedModel(OneLength, positional(one_length)),
    "all_of_one_length": NamedModel(AllOfOneLength, positional(all_of_one_length)),
    "numbers_by_event": NamedModel(Measured, events),
    "beside_pooled": NamedModel(BesidePooled, positional(histories_and_pooled, dense)),
    "raw_ids": NamedModel(RawIds, positional(raw)),
}
