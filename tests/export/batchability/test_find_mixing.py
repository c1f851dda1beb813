"""Whether samples may meet is read off the operators of a dense part, not off what some inputs happen to show."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from export.batchability.find_mixing import find_mixing
from export.batchability.probe_mixing import probe_mixing
from export.capture.dense_trace import DenseTrace
from export.capture.graph_inputs import DenseInputs
from serving.bundle.scores import DenseDtype
from tests.support.long_cases import one_in

SAMPLES, WIDTH, DENSE = 64, 12, 7
Forward = Callable[["Parts", Tensor, Tensor], Tensor]


class Parts(nn.Module):
    """Layers that forwards below are made of. `forward` answers with several of them."""

    def __init__(self, forwards: dict[str, Forward]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forwards = forwards
        self.linear, self.small = nn.Linear(WIDTH, 6), nn.Linear(4, 4)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.batch_only = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.places_first = nn.MultiheadAttention(4, 2)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.lstm, self.gru = nn.LSTM(4, 5, batch_first=True), nn.GRU(4, 5, batch_first=True)
        self.conv, self.groups = nn.Conv1d(3, 5, 2), nn.GroupNorm(3, WIDTH)
        self.table, self.prelu = nn.Embedding(10, 4), nn.PReLU()
        self.bilinear = nn.Bilinear(WIDTH, DENSE, 4)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.rows, self.columns = torch.triu_indices(3, 3, 1)

    def forward(self, embeddings: Tensor, dense: Tensor) -> tuple[Tensor, ...]:
        return tuple(forward(self, embeddings, dense) for forward in self.forwards.values())


def as_graph(module: nn.Module) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_module("module", (graph.placeholder("embeddings"), graph.placeholder("dense"))))
    return fx.GraphModule({"module": module.eval()}, graph)


def probe() -> DenseInputs:
    torch.manual_seed(1)
    return DenseInputs(torch.randn(SAMPLES, WIDTH), (torch.rand(SAMPLES, DENSE),))


def mixing_of(module: nn.Module) -> str | None:
    return find_mixing(DenseTrace(as_graph(module), probe()))


def blocks(e: Tensor) -> Tensor:
    return e.view(-1, 3, 4)


def attention(e: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(e, e, e)


def sets_columns(e: Tensor, d: Tensor) -> Tensor:
    x = e.clone()
    x[:, 0] = d[:, 0]
    x[:, 2:4] = 1.0
    x += 1
    x[:, :DENSE].add_(d)
    return x


def sets_a_sample(e: Tensor) -> Tensor:
    x = e.clone()
    x[0] = 1
    return x


APART: dict[str, Forward] = {
    "linear": lambda m, e, _: m.linear(e),
    "linear of blocks": lambda m, e, _: m.small(blocks(e)).flatten(1),
    "weights first": lambda m, e, _: (m.linear.weight @ e.t()).t(),
    "matmul with a vector": lambda m, e, _: e @ m.weight,
    "norms": lambda m, e, _: m.norm(e) + m.batch_norm(e) + m.groups(e),
    "activations": lambda m, e, _: functional.gelu(e) + functional.silu(e) + functional.softplus(e) + m.prelu(e),
    "softmax": lambda _, e, __: e.softmax(-1) + e.log_softmax(1) + e.logsumexp(1, keepdim=True),
    "sums": lambda _, e, __: e.sum(1) + e.mean(1) + e.amax(1) + e.std(1) + e.max(1).values + e.norm(dim=1),
    "scaled by a fixed size": lambda _, e, __: e / e.size(-1) ** 0.5,
    "attention": lambda m, e, _: m.attention(*[blocks(e)] * 3)[0].mean(1),
    "attention, places first": lambda m, e, _: m.places_first(*[blocks(e).transpose(0, 1)] * 3)[0].transpose(0, 1),
    "encoder": lambda m, e, _: m.encoder(blocks(e)).flatten(1),
    "operator of attention": lambda _, e, __: attention(e.view(-1, 1, 3, 4)),
    "recurrent": lambda m, e, _: m.lstm(blocks(e))[0][:, -1] + m.gru(blocks(e))[0][:, -1],
    "convolution": lambda m, e, _: m.conv(blocks(e)).flatten(1),
    "bilinear": lambda m, e, d: m.bilinear(e, d) + m.bilinear(m.weight.expand(e.size(0), -1), d),
    "interactions": lambda m, e, _: torch.bmm(blocks(e), blocks(e).transpose(1, 2))[:, m.rows, m.columns],
    "einsum": lambda _, e, d: torch.einsum("bi,bj->bij", e, d) + torch.einsum("bik,bjk->bij", blocks(e), blocks(e)).sum((1, 2))[:, None, None],
    "factorization machine": lambda _, e, __: (blocks(e).sum(1) ** 2 - (blocks(e) ** 2).sum(1)).sum(1),
    "diagonal": lambda _, e, __: torch.bmm(blocks(e), blocks(e).transpose(1, 2)).diagonal(dim1=1, dim2=2),
    "side by side": lambda m, e, d: torch.cat([e, d, m.weight.expand(e.shape[0], -1), torch.zeros(e.size(0), 2)], 1),
    "stacked": lambda _, e, __: torch.stack([e, e * 2], 1),
    "one behind the other": lambda m, e, _: m.linear(torch.cat([e, e * 2], 0)).view(2, -1, 6).sum(0),
    "repeated": lambda m, e, _: e.unsqueeze(1).repeat(1, 3, 1).view(-1, WIDTH).view(-1, 3, WIDTH).sum(1) + m.weight.unsqueeze(0).repeat(e.size(0), 1),
    "pieces": lambda _, e, __: e[:, 3:][:, :4] + e.chunk(3, 1)[1] + blocks(e).unbind(1)[1],
    "sorted": lambda _, e, __: e.topk(3, 1).values + e.sort(1)[0][:, :3] + e.cumsum(1)[:, :3] + e.flip(1)[:, :3],
    "gathered": lambda m, e, _: e.gather(1, e.argmax(1, keepdim=True)) + m.table(e.argmax(1) % 10),
    "normalized": lambda _, e, d: functional.normalize(e, dim=1) + functional.cosine_similarity(e[:, :DENSE], d)[:, None],
    "chosen": lambda _, e, __: torch.where(e > 0, e, 0.5 * e).masked_fill(e < -1, 0.0).clamp(-1, 1),
    "columns set": lambda _, e, d: sets_columns(e, d),
    "permuted": lambda _, e, __: blocks(e).permute(1, 0, 2).sum(0),
    "padded": lambda _, e, __: functional.pad(e, (1, 2)),
    "buckets": lambda m, e, _: torch.bucketize(e, m.weight.sort()[0]).float(),
    "no dropout": lambda _, e, __: functional.dropout(e, 0.5, training=False),
}  # fmt: skip


def test_operators_that_keep_samples_apart_are_recognized() -> None:
    module = Parts(APART)
    assert mixing_of(module) is None
    assert probe_mixing(partial(run, module, list(APART)), probe(), DenseDtype.FP32, {}) is None


def run(module: nn.Module, names: list[str], inputs: DenseInputs) -> dict[str, Any]:
    with torch.no_grad():
        answer = module(inputs.embeddings, *inputs.dense)
    outputs = answer if isinstance(answer, tuple) else (answer,)
    return {name: output.numpy() for name, output in zip(names, outputs, strict=True)}


MEET: dict[str, Forward] = {
    # None of these shows for dense inputs in [0, 1).
    "relu(dense - 5).sum()": lambda _, e, d: e + functional.relu(d - 5).sum() * 0.1,
    "dense / its largest": lambda _, e, d: torch.cat([e, d / d.abs().max().clamp(min=1)], 1),
    "(dense > 5).any()": lambda _, e, d: e * (d > 5).any(),
    "where of a sum": lambda _, e, d: e + torch.where(d.sum() > 1e6, 1.0, 0.0),
    # Of what is seen with 64 samples, or with 1 and 3, nothing.
    "size // 100": lambda _, e, __: e * (e.size(0) // 100),
    "branch on the size": lambda _, e, __: e * 2 if e.size(0) > 100 else e,
    "min of the size": lambda _, e, __: e[:, : min(e.size(0), 200)],
    "mean over samples": lambda _, e, __: e - e.mean(0),
    "sum over all": lambda _, e, __: e - e.sum(),
    "statistics of the batch": lambda m, e, _: m.batch_only(e),
    "softmax over samples": lambda _, e, __: e.softmax(0),
    "divided by the size": lambda _, e, __: e / e.size(0),
    "divided by numel": lambda _, e, __: e / e.numel(),
    "columns chosen by the size": lambda _, __, d: d.narrow(1, d.size(0) // 200 % 4, 1),
    "columns from the size": lambda _, e, __: e[:, e.size(0) // 200 % 4 :][:, :2],
    "filled with the size": lambda _, e, __: e + torch.full((e.size(0), 1), e.size(0) * 1.0),
    "position": lambda _, e, __: e + torch.arange(e.size(0)).unsqueeze(1),
    "flipped": lambda _, e, __: e.flip(0),
    "rolled": lambda _, e, __: e.roll(1, 0),
    "rolled flat": lambda _, e, __: e.roll(1),
    "cumulated": lambda _, e, __: e.cumsum(0),
    "sorted": lambda _, e, __: e.sort(0)[0],
    "by the order of samples": lambda _, e, d: e[torch.argsort(d[:, 0])],
    "in-batch softmax": lambda _, e, __: (e @ e.t()).softmax(1).sum(1),
    "in-batch products": lambda _, e, __: (e @ e.t()).diagonal(),
    "distances": lambda _, e, __: torch.cdist(e, e).sum(1),
    "covariance": lambda _, e, __: e @ (e.t() @ e),
    "einsum over samples": lambda _, e, __: torch.einsum("bi,bj->ij", e, e).sum() + e,
    "[B, 1] with [B]": lambda _, e, d: (e[:, :1] + d[:, 0]).sum(1),
    "transposed before a view": lambda _, e, __: e.t().reshape(-1, WIDTH),
    "blocks of samples": lambda _, e, __: e.view(3, -1, 4).sum(0) if e.size(0) % 3 == 0 else e,
    "the first sample": lambda _, e, __: e - e[0],
    "the last sample": lambda _, e, __: e - e[-1:],
    "a sample set": lambda _, e, __: sets_a_sample(e),
    "shifted": lambda _, e, __: functional.pad(e, (0, 0, 1, 0))[:-1],
    "random": lambda _, e, __: e + torch.rand_like(e),
    "attention over samples": lambda m, e, _: m.places_first(*[blocks(e)] * 3)[0].flatten(1),
    "normalized over samples": lambda _, e, __: functional.normalize(e, dim=0),
    "norm of all": lambda _, e, __: e / e.norm(),
    "median of all": lambda _, e, __: e - e.median(),
    "convolution over samples": lambda _, e, __: functional.conv1d(e.t()[None], torch.ones(12, 12, 3), padding=1)[0].t(),
    "pooled over samples": lambda _, e, __: functional.avg_pool1d(e.t(), 3, 1, 1).t(),
    "expanded, then summed": lambda _, e, __: e.unsqueeze(0).expand(e.size(0), -1, -1).sum(1),
    "scattered over samples": lambda _, e, d: torch.zeros(9, 12).index_add(0, d[:, 0].long() % 9, e)[d[:, 0].long() % 9],
    "gathered over samples": lambda _, e, __: e.gather(0, torch.zeros(e.shape, dtype=torch.long)),
    "number of the largest": lambda _, e, __: e * e.flatten().argmax(),
    "count of what is not zero": lambda _, e, d: e * d.nonzero().shape[0],
    "number of a tensor": lambda _, e, d: e * d.sum().item(),
    "equal": lambda _, e, __: e * float(torch.equal(e, e)),
    "triangle": lambda _, e, __: torch.tril(e),
    "strides": lambda _, e, __: e.as_strided((e.size(0), 12), (0, 1)),
    "a mean alone": lambda _, e, __: e.mean().expand(e.size(0)),
    "bilinear over samples": lambda _, e, d: e + torch._trilinear(e[:, :1], torch.ones(1, 1), d[:, :1], [], [], [], [0]).expand(e.size(0))[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(6, MEET))
def test_where_samples_may_meet_is_named(name: str) -> None:
    mixed_by = mixing_of(Parts({name: MEET[name]}))
    assert mixed_by is not None
    assert mixed_by.startswith(("aten.", "a step that torch.export cannot trace: "))


@pytest.mark.parametrize(
    "forward",
    [
        lambda _, e, d: e * (torch.arange(e.size(0)) < d[:, 0] * 1e6).unsqueeze(1),
        lambda _, e, d: e + torch.bucketize(d[:, 0] * 1e6, torch.arange(e.size(0))).unsqueeze(1),
        lambda _, e, d: d[torch.arange(e.size(0)), torch.arange(e.size(0))],
        lambda _, e, d: e * torch.arange(e.size(0)).unsqueeze(1) * d[:, :1],
    ],
    ids=["a limit", "borders", "places", "a factor"],
)
def test_using_the_index_of_a_sample_counts_as_mixing(forward: Forward) -> None:
    """Merged with others, a request's samples have other numbers, whatever 64 samples happen to show."""
    mixed_by = mixing_of(Parts({"numbered": forward}))
    assert mixed_by is not None
    assert mixed_by.startswith("aten.")


def test_mixing_is_reported_with_the_line_of_the_model() -> None:
    class Surges(nn.Module):
        def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
            numbers = functional.relu(dense - 5)
            return embeddings + numbers.sum() * 0.1  # to blame

    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    module = Surges()
    graph = fx.GraphModule(module, tracer.trace(module))
    mixed_by = find_mixing(DenseTrace(graph, probe()))
    assert mixed_by is not None
    assert mixed_by.startswith("aten.sum.dim_IntList at test_find_mixing.py, line ")
    assert mixed_by.endswith("`return embeddings + numbers.sum() * 0.1  # to blame`")


def test_a_buffer_that_changes_counts_as_mixing() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:  # noqa: ARG002
            self.calls.add_(1)
            return embeddings

    assert mixing_of(Counts()) == "its buffer 'module.module.calls' changes"
