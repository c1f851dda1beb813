"""Models of attention over a user's history: DIN, MIND, SASRec, BERT4Rec, each small and our own."""

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from tests.models.inputs import DIM, POOLED, ROWS, NamedModel, ids, of, positional
from tests.models.sequences import LONGEST, Rows, histories, not_empty
from tests.support.models import collection
from tests.support.sequence_models import sequences


class OfTarget(Rows):
    """DIN: each event is weighed by a small network over it, the target, and both together; masked by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(4 * DIM, 8), nn.PReLU(), nn.Linear(8, 1))
        self.over = nn.Linear(2 * DIM, 1)

    def attended(self, target: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        longest = history.size(1)
        queries = target.unsqueeze(1).expand(-1, longest, -1)
        logits = self.weigh(torch.cat([queries, history, queries - history, queries * history], dim=-1)).transpose(
            1, 2
        )
        mask = torch.arange(longest, device=lengths.device).expand(lengths.size(0), longest) < lengths.unsqueeze(1)
        weights = torch.where(mask.unsqueeze(1), logits, torch.full_like(logits, -(2.0**32) + 1)).softmax(dim=-1)
        return torch.matmul(weights, history).squeeze(1)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        target = rows["target"].to_padded_dense(1)[:, 0]
        history = rows["seen"].to_padded_dense(LONGEST)
        answer: Tensor = self.over(torch.cat([self.attended(target, history, rows["seen"].lengths()), target], dim=1))
        return answer.squeeze(1)


class OfPooledTarget(OfTarget):
    """TorchEasyRec's DIN towers: the target is a pooled feature, the history is not."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(POOLED[1:2])

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history, target = self.rows(keyed)["seen"], self.bags(keyed)["item_id"]
        answer: Tensor = self.over(
            torch.cat([self.attended(target, history.to_padded_dense(LONGEST), history.lengths()), target], dim=1)
        )
        return answer


class Interests(Rows):
    """MIND: capsules of interests by dynamic routing, as many rounds as it is told; label-aware attention after it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM, bias=False)
        self.first_logits: Tensor
        self.register_buffer("first_logits", torch.randn(3, LONGEST))

    def forward(self, keyed: KeyedJaggedTensor) -> dict[str, Tensor]:
        rows = self.rows(keyed)
        history, lengths = rows["seen"].to_padded_dense(LONGEST), rows["seen"].lengths()
        real = (torch.arange(LONGEST) < lengths.unsqueeze(1)).unsqueeze(1)
        mapped = self.map(history)
        logits = self.first_logits.unsqueeze(0).repeat(history.size(0), 1, 1)
        interests = mapped[:, :3]
        for _ in range(3):
            weights = torch.softmax(logits, dim=1) * real
            total = torch.matmul(weights, mapped)
            square = torch.sum(torch.square(total), dim=-1, keepdim=True)
            interests = square / (1 + square) * total / (square + 1e-8).sqrt()
            logits = logits + torch.matmul(interests, mapped.transpose(1, 2))
        target = rows["target"].to_padded_dense(1)[:, 0]
        weights = torch.pow(torch.einsum("bkd,bd->bk", interests, target).clamp(min=0), 2).softmax(dim=1)
        return {
            "interests": interests,
            "similarity": ((weights.unsqueeze(-1) * interests).sum(dim=1) * target).sum(dim=1),
        }


class Causal(Rows):
    """SASRec: blocks of causal attention over positions, and the last event's state against a target."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LONGEST, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention = nn.ModuleList(nn.MultiheadAttention(DIM, 2, batch_first=True) for _ in range(2))
        self.forward_layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)) for _ in range(2)
        )
        self.last = nn.LayerNorm(DIM)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(keyed)
        history = rows["seen"]
        states = history.to_padded_dense(LONGEST) + self.positions(torch.arange(LONGEST))
        real = (torch.arange(LONGEST) < history.lengths().unsqueeze(1)).unsqueeze(-1)
        causal = ~torch.tril(torch.ones((LONGEST, LONGEST), dtype=torch.bool))
        states = states * real
        for norm, attention, layer in zip(self.norms, self.attention, self.forward_layers, strict=True):
            queries = norm(states)
            attended, _ = attention(queries, states, states, attn_mask=causal, need_weights=False)
            states = (layer(queries + attended) + attended) * real
        last_index = (history.lengths().long() - 1).clamp(min=0)
        state = self.last(states)[torch.arange(states.size(0)), last_index]
        score: Tensor = (state * rows["target"].to_padded_dense(1).squeeze(1)).sum(dim=-1)
        return score


class Bidirectional(Rows):
    """BERT4Rec: attention with a mask made of ids, written out, and scores of all items at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.rand(LONGEST, DIM))
        self.norm = nn.LayerNorm([LONGEST, DIM])
        self.linears = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, 60)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        items = keyed["seen"].to_padded_dense(desired_length=LONGEST)
        mask = (items > 0).unsqueeze(1).repeat(1, items.size(1), 1).unsqueeze(1)
        padded = self.rows(keyed)["seen"].to_padded_dense(LONGEST)
        states = self.norm(padded + self.positions.unsqueeze(0).repeat(keyed.stride(), 1, 1))
        samples = states.size(0)
        query, key, value = [linear(states).view(samples, -1, 2, DIM // 2).transpose(1, 2) for linear in self.linears]
        scores = torch.matmul(query, key.transpose(-2, -1)) / (DIM // 2) ** 0.5
        weights = scores.masked_fill(mask == 0, -1e9).softmax(dim=-1)
        attended = torch.matmul(weights, value).transpose(1, 2).contiguous().view(samples, -1, DIM)
        answer: Tensor = self.out(attended)
        return answer


class HeadsInBatch(nn.Module):
    """gSASRec on TorchRec: ids [B, L] are B · L samples of one id each; heads are joined along the batch, and parted again."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sequences(ROWS[1:])
        self.linears = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.positions = nn.Embedding(LONGEST, DIM)

    def forward(self, events: Tensor) -> tuple[Tensor, list[Tensor]]:
        every = events.long().flatten()
        keyed = KeyedJaggedTensor(["visited"], every, lengths=torch.ones(every.shape[0], dtype=torch.int32))
        states = self.rows(keyed)["visited"].values().view(*events.shape, DIM)
        mask = (events != ROWS[1].rows - 1).float().unsqueeze(-1)
        states = states + self.positions(torch.arange(states.shape[1]).unsqueeze(0).repeat(states.size(0), 1))
        states *= mask
        query, key, value = (torch.cat(linear(states).chunk(2, dim=2), dim=0) for linear in self.linears)
        scores = torch.matmul(query, key.transpose(1, 2)) / key.size(-1) ** 0.5
        scores = scores.masked_fill(mask.squeeze(-1).repeat(2, 1).unsqueeze(1) == 0, float("-inf"))
        causal = torch.tril(torch.ones_like(scores[0]))[None, :, :].repeat(scores.size(0), 1, 1)
        weights = torch.nan_to_num(scores.masked_fill(causal == 0, float("-inf")).softmax(dim=-1), nan=0.0)
        attended = torch.cat(torch.matmul(weights, value).chunk(2, dim=0), dim=2)
        return attended + states, [torch.stack(weights.chunk(2, dim=0), dim=1)]


class Encoder(Rows):
    """nn.TransformerEncoder with a padding mask, and the mean over what is there."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        missing = torch.arange(LONGEST) >= history.lengths().unsqueeze(1)
        states = self.encoder(history.to_padded_dense(LONGEST), src_key_padding_mask=missing)
        mean = states.masked_fill(missing.unsqueeze(-1), 0.0).sum(dim=1) / history.lengths().unsqueeze(1)
        answer: Tensor = self.top(mean)
        return answer


class Scaled(Rows):
    """F.scaled_dot_product_attention of a query for each user, with a bool mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.rand(1, DIM))

    def forward(self, keyed: KeyedJaggedTensor) -> Tensor:
        history = self.rows(keyed)["seen"]
        padded = history.to_padded_dense(LONGEST)
        mask = (torch.arange(LONGEST) < history.lengths().unsqueeze(1)).unsqueeze(1)
        query = self.query.unsqueeze(0).expand(padded.size(0), -1, -1)
        attended = nn.functional.scaled_dot_product_attention(query, padded, padded, attn_mask=mask)
        answer: Tensor = self.top(attended.squeeze(1))
        return answer


ATTENTION: dict[str, NamedModel] = {
    "din": NamedModel(OfTarget, positional(histories)),
    "din_with_pooled_target": NamedModel(
        OfPooledTarget,
        positional(lambda random, n: ids(random, n, "item_id", "seen", "target", "visited", most=LONGEST)),
    ),
    "mind": NamedModel(Interests, positional(histories)),
    "heads_in_batch": NamedModel(HeadsInBatch, positional(lambda random, n: of(random, ROWS[1].rows, n, LONGEST))),
    "sasrec": NamedModel(Causal, positional(not_empty)),
    "bert4rec": NamedModel(Bidirectional, positional(not_empty)),
    "transformer_encoder": NamedModel(Encoder, positional(not_empty)),
    "scaled_attention": NamedModel(Scaled, positional(not_empty)),
}
