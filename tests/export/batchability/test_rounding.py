"""What rounding does to scores of large numbers is no sign that samples meet; what samples do to each other is."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.batchability.probe_mixing import probe_mixing
from export.batchability.probes import scaled_probes
from export.batchability.rounding import Rounding
from export.capture.graph_inputs import DenseInputs
from serving.bundle.scores import DenseDtype
from tests.export.batchability.test_find_mixing import DENSE, SAMPLES, WIDTH, probe
from tests.support.long_cases import one_in

TASKS = 150
Scores = Callable[[DenseInputs], Mapping[str, Any]]


def weights() -> Tensor:
    return torch.randn(WIDTH + DENSE, TASKS, generator=torch.Generator().manual_seed(0))


def logits(inputs: DenseInputs) -> Tensor:
    """Sums in another order where there are fewer samples, as a product of matrices may make them."""
    terms = torch.cat([inputs.embeddings, *inputs.dense], 1).unsqueeze(2) * weights()
    columns = range(terms.size(1)) if inputs.samples == SAMPLES else reversed(range(terms.size(1)))
    total = torch.zeros(terms.size(0), TASKS)
    for column in columns:
        total = total + terms[:, column]
    return total


def gates(inputs: DenseInputs) -> Mapping[str, Any]:
    """As in MMoE: a softmax over experts."""
    return {"s": logits(inputs).softmax(1).numpy()}


def towers(inputs: DenseInputs) -> Mapping[str, Any]:
    """As in DBMTL: a sigmoid for each task."""
    return {"s": torch.sigmoid(logits(inputs)).numpy()}


def cancelled(inputs: DenseInputs) -> Mapping[str, Any]:
    """Large terms whose sum is small."""
    total = logits(inputs)
    return {"s": (torch.relu(total) - torch.relu(-total) - total.double().float() + 1e-3 * torch.tanh(total)).numpy()}


@pytest.mark.parametrize("scores", [gates, towers, cancelled])
def test_sums_in_another_order_do_not_count_as_mixing(scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_mixing(scores, probe(), DenseDtype.FP32, {}) is None
    if scores is towers:
        monkeypatch.setattr(Rounding, "_nudged", {})  # a limit of 1e-5 alone takes it for mixing
        assert probe_mixing(scores, probe(), DenseDtype.FP32, {}) == "output 's' differs for samples alone"


def centred(inputs: DenseInputs) -> Mapping[str, Any]:
    total = logits(inputs)
    return {"s": torch.sigmoid(total - 1e-3 * total.mean(0)).numpy()}


def by_their_number(inputs: DenseInputs) -> Mapping[str, Any]:
    return {"s": torch.sigmoid(logits(inputs) * (1 + inputs.samples * 1e-5)).numpy()}


def above(inputs: DenseInputs) -> Mapping[str, Any]:
    """Only at 10⁶."""
    largest = inputs.dense[0].abs().max()
    return {"s": torch.sigmoid(logits(inputs) - torch.relu(largest - 1e5)).numpy()}


@pytest.mark.parametrize("scores", [centred, by_their_number, above])
def test_mixed_samples_are_detected_despite_rounding(scores: Scores) -> None:
    assert probe_mixing(scores, probe(), DenseDtype.FP32, {}) is not None


def test_rounding_does_not_explain_larger_differences() -> None:
    """At each size but the smallest, where a sigmoid is 0.5: a change of one part in a thousand."""
    generator = torch.Generator().manual_seed(0)
    for inputs in scaled_probes(probe())[1:]:
        numbers = towers(inputs)
        rounding = Rounding(towers, inputs, numbers, DenseDtype.FP32, is_usual=False)
        assert rounding.explains("s", numbers["s"])
        moved = inputs.with_floats(lambda _, old: old * (1 + 1e-3 * torch.randn(old.shape, generator=generator)))
        assert not rounding.explains("s", towers(moved)["s"])
        assert not rounding.explains("s", np.full_like(numbers["s"], np.nan))


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_a_model_of_experts_keeps_samples_apart(seed: int) -> None:
    torch.manual_seed(seed)
    width = WIDTH + DENSE
    experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(4))
    gate, tower = nn.Linear(width, 4), nn.Linear(16, TASKS)

    def scores(bottom: nn.ModuleList, inputs: DenseInputs) -> Mapping[str, Any]:
        x = torch.cat([inputs.embeddings, *inputs.dense], 1)
        with torch.no_grad():
            mixed = gate(x).softmax(1).unsqueeze(1) @ torch.stack([expert(x) for expert in bottom], 1)
            return {"click": torch.sigmoid(tower(mixed.squeeze(1))).numpy(), "gate": gate(x).softmax(1).numpy()}

    assert probe_mixing(partial(scores, experts), probe(), DenseDtype.FP32, {}) is None


def test_rounding_does_not_explain_random_numbers() -> None:
    def random(inputs: DenseInputs) -> Mapping[str, Any]:
        return {"s": towers(inputs)["s"] + torch.randn(()).numpy()}

    def chaotic(inputs: DenseInputs) -> Mapping[str, Any]:
        return {"s": np.sin(1e9 * towers(inputs)["s"])}

    for inputs in scaled_probes(probe()):
        numbers = random(inputs)
        assert not Rounding(random, inputs, numbers, DenseDtype.FP32, is_usual=False).explains(
            "s", random(inputs)["s"]
        )
    numbers = chaotic(probe())
    rounding = Rounding(chaotic, probe(), numbers, DenseDtype.FP32, is_usual=True)
    assert not rounding.explains("s", numbers["s"] + 0.1)
