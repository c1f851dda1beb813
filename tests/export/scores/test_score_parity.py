"""What a refusal of a dense part says about the difference."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from export.capture.graph_inputs import DenseInputs
from export.errors import ParityError
from export.scores.score_parity import expect_model_scores
from tests.export.batchability.test_find_mixing import probe


def zero(inputs: DenseInputs, *, is_reversed: bool = False) -> Tensor:
    """0 in exact arithmetic: a softmax less its own sum."""
    gates = torch.cat([inputs.embeddings, *inputs.dense], 1).softmax(1)
    gates = gates.flip(1) if is_reversed else gates
    total = torch.zeros(len(gates))
    for column in gates.unbind(1):
        total = total + column
    return total - 1


def scores(inputs: DenseInputs) -> Mapping[str, Any]:
    return {"s": zero(inputs).numpy()}


def test_scores_of_0_with_rounding_are_explained_as_rounding() -> None:
    eager = {"s": zero(probe(), is_reversed=True)}
    with pytest.raises(ParityError) as refused:
        expect_model_scores("Module", eager, scores, probe(), is_usual=True)
    message = str(refused.value)
    assert message.startswith(
        "Module: output 's': what follows the collections answers differently from the model, by "
    )
    assert f", where the largest |number| is {float(eager['s'].abs().max()):.3g}: rounding of its inputs" in message
    assert "does not have changes it" not in message


def test_a_score_error_names_the_usual_causes() -> None:
    eager = {"s": zero(probe()) + 1e-3}
    with pytest.raises(ParityError, match="something that a graph of its forward does not have changes it"):
        expect_model_scores("Module", eager, scores, probe(), is_usual=True)
