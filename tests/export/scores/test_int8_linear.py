"""INT8 layers answer as those of `torch.ao.quantization.quantize_dynamic`, which torch has deprecated."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from export.scores.int8_linear import PackedInt8Linear, PlainInt8Linear

ROWS = {
    "both signs": torch.randn(33, 64),
    "positive": torch.rand(5, 64) * 1e3,
    "negative": -torch.rand(5, 64),
    "zeros": torch.zeros(2, 64),
    "tiny": torch.full((2, 64), 1e-9),
    "tiny and negative": torch.full((2, 64), -3e-7),
    "small range": torch.randn(7, 64) * 1e-4,
    "one row": torch.randn(1, 64) * 40,
    "three dimensions": torch.randn(4, 3, 64),
}


def layer(*, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 32, bias=bias).eval()


def quantized_dynamically(linear: nn.Linear) -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(nn.Sequential(linear), {nn.Linear}, torch.qint8)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS.values(), ids=[*ROWS])
def test_both_layers_answer_as_quantize_dynamic(rows: Tensor, bias: bool) -> None:
    """By torch's operator to the bit; by operators that torch.export follows but for the last bits of FP32."""
    linear = layer(bias=bias)
    with torch.no_grad():
        expected = quantized_dynamically(linear)(rows)
        torch.testing.assert_close(PackedInt8Linear(linear)(rows), expected, rtol=0, atol=0)
        limit = 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(PlainInt8Linear(linear)(rows), expected, rtol=0, atol=limit)


def test_a_layer_of_zeros_has_a_scale() -> None:
    linear = layer(bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        for quantized in (PackedInt8Linear(linear), PlainInt8Linear(linear)):
            assert not quantized(torch.ones(3, 64)).any()


def test_layers_are_made_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackedInt8Linear(layer(bias=True))
        PlainInt8Linear(layer(bias=True))
