"""A model whose scores are made of sequences: its dense part by hand, and what it answers, in numpy."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from serving.bundle.scores import DenseInput, DensePart, JaggedInput, JaggedKind
from tests.support.handwritten_dense_part import with_dense_part
from tests.support.models import Bags, random_bags
from tests.support.sequence_models import SPECS, Mixed, kjt_of

Numbers = npt.NDArray[Any]
INPUTS = (DenseInput("price", (2,)),)
OUTPUTS = {"attended": (32,), "total": (), "sent": (4,)}
JAGGED = (
    JaggedInput(JaggedKind.ROWS, "recent"),
    JaggedInput(JaggedKind.LENGTHS, "recent"),
    JaggedInput(JaggedKind.IDS, "recent"),
    JaggedInput(JaggedKind.ROWS, "words"),
    JaggedInput(JaggedKind.LENGTHS, "words"),
    JaggedInput(JaggedKind.LENGTHS, "genres"),
    JaggedInput(JaggedKind.IDS, "genres"),
)


def sums(numbers: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each sample's numbers: [n, …] → [B, …]."""
    samples = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.long())
    totals = torch.zeros([lengths.numel()] + list(numbers.shape[1:]))  # noqa: RUF005  TorchScript has no other
    return totals.index_add(0, samples, numbers.float())


class Histories(nn.Module):
    """Each jagged input is seen in the answer."""

    is_relative = False
    __constants__ = ("is_relative",)

    def forward(
        self,
        embeddings: Tensor,
        price: Tensor,
        recent: Tensor,
        recent_lengths: Tensor,
        recent_ids: Tensor,
        words: Tensor,
        words_lengths: Tensor,
        genres_lengths: Tensor,
        genres: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended = sums(recent.float() * (1 + recent_ids % 3).unsqueeze(1), recent_lengths)
        total = embeddings.float().sum(1) + price.sum(1) + sums(words, words_lengths).sum(1)
        sent = [recent_lengths.float(), words_lengths.float(), genres_lengths.float(), sums(genres, genres_lengths)]
        if self.is_relative:
            attended, total = attended - attended.mean(0), total - total.mean(0)
        return attended, total, torch.stack(sent, dim=1)


class Relative(Histories):
    """The same, less what all samples have: they must not be scored with those of other requests."""

    is_relative = True


def say(**changes: Any) -> Callable[[DensePart], DensePart]:
    """Says more of a dense part."""
    return lambda part: msgspec.structs.replace(part, **changes)


def with_histories(bundle: Path, program: nn.Module | None = None, **changes: Any) -> Path:
    """The bundle of a `Mixed`, with the dense part above."""
    program = Histories() if program is None else program
    return with_dense_part(bundle, program, INPUTS, OUTPUTS, say(**{"jagged": JAGGED, **changes}))


def random_histories(random: np.random.Generator, samples: int, longest: int = 6) -> tuple[dict[str, Bags], Any]:
    """Ids of all features, and dense inputs."""
    return random_bags(random, SPECS, samples, longest=longest), {"price": random.random((samples, 2), np.float32)}


def expected(
    module: Mixed, bags: Mapping[str, Bags], dense: Mapping[str, Numbers], relative: bool = False
) -> dict[str, Numbers]:
    """What the dense part answers to what the module's own collections answer. A negative id reads zeros."""
    there = {key: [[max(id_, 0) for id_ in bag] for bag in column] for key, column in bags.items()}
    pooled = {key: [[id_ for id_ in bag if id_ >= 0] for bag in column] for key, column in bags.items()}
    samples = len(dense["price"])
    if not samples:
        return {name: np.zeros((0, *shape), np.float32) for name, shape in OUTPUTS.items()}
    with torch.no_grad():
        embeddings = module.pooled(kjt_of(pooled)).values().numpy().astype(np.float64)
        rows = {name: row.to_dense() for name, row in module.rows(kjt_of(there)).items()}
    outputs: dict[str, Numbers] = {name: np.zeros((samples, *shape)) for name, shape in OUTPUTS.items()}
    for sample in range(samples):
        of = {name: _rows(rows[name][sample].numpy(), bags[name][sample]) for name in ("recent", "words")}
        factors = np.array([1 + id_ % 3 for id_ in bags["recent"][sample]]).reshape(-1, 1)
        outputs["attended"][sample] = (of["recent"] * factors).sum(0)
        outputs["total"][sample] = embeddings[sample].sum() + dense["price"][sample].sum() + of["words"].sum()
        lengths = [len(bags[key][sample]) for key in ("recent", "words", "genres")]
        outputs["sent"][sample] = [*lengths, sum(bags["genres"][sample])]
    if relative:
        for name in ("attended", "total"):
            outputs[name] -= outputs[name].mean(0)
    return outputs


def _rows(rows: Numbers, ids: Sequence[int]) -> Numbers:
    return rows.astype(np.float64) * (np.array(ids, np.int64) >= 0).reshape(-1, 1)


def assert_scores(scores: Mapping[str, Any], right: Mapping[str, Numbers], tolerance: float = 1e-5) -> None:
    """That scores are right but for rounding."""
    assert scores.keys() == right.keys()
    for name, numbers in right.items():
        assert scores[name].shape == numbers.shape, name
        scale = max(1.0, np.abs(numbers).max(initial=0))
        np.testing.assert_allclose(scores[name], numbers, rtol=0, atol=tolerance * scale, err_msg=name)
