"""nn.Linear with INT8 weights, whose inputs are quantized by the range that they have in a batch.

The weights have one symmetric scale, and the inputs 7 bits, as `torch.ao.quantization.quantize_dynamic` has them.
torch has deprecated that function, and it makes the same bits as `PackedInt8Linear`.
"""

import warnings

import torch
from torch import Tensor, nn

# The codes of inputs: of 7 bits, so that sums of two products fit 16 bits in FBGEMM's kernels.
_HIGHEST_CODE = 127
# The least scale of inputs, SMALL_SCALE_THRESHOLD in FBGEMM's QuantUtils.h.
_LEAST_SCALE = 6.1e-5


def weight_codes(weight: Tensor) -> tuple[Tensor, float]:
    """The INT8 codes of a weight, int8 of its shape, and their scale."""
    weight = weight.detach().float()
    scale = (weight.abs().max() / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return (weight / scale).round().clamp(-128, 127).to(torch.int8), float(scale)


class PackedInt8Linear(nn.Module):
    """By torch's operator for dynamic quantization, which FBGEMM computes. torch.export cannot follow it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        codes, scale = weight_codes(layer.weight)
        with warnings.catch_warnings():
            # torch 2.13 deprecates tensors with a quantized dtype. Its operator takes its weights by no other way.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
            weight = torch._make_per_tensor_quantized_tensor(codes, scale, 0)
        bias = None if layer.bias is None else layer.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack(weight, bias)

    def forward(self, rows: Tensor) -> Tensor:
        """[…, columns] → […, outputs], float32."""
        answer: Tensor = torch.ops.quantized.linear_dynamic(rows, self.packed, True)
        return answer


class PlainInt8Linear(nn.Module):
    """By operators that torch.export follows. It answers as `PackedInt8Linear`, but for the rounding of FP32.

    Scale and zero point of the inputs are those of FBGEMM's ChooseQuantizationParams (QuantUtils.cc).
    """

    codes: Tensor
    sums: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        codes, self.scale = weight_codes(layer.weight)
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("sums", codes.to(torch.int32).sum(1))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """[…, columns] → […, outputs], float32."""
        scale, zero_point = _quantization_of(rows)
        codes = (rows * (1 / scale) + zero_point).round().clamp(0, _HIGHEST_CODE).to(torch.int8)
        products = torch._int_mm(codes.reshape(-1, codes.shape[-1]), self.codes)
        products = products - zero_point.to(torch.int32) * self.sums
        answer = products.float() * (scale * self.scale)
        if self.bias is not None:
            answer = answer + self.bias
        return answer.view(*rows.shape[:-1], answer.shape[-1])


def _quantization_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of inputs, float32 []."""
    low, high = rows.amin().clamp(max=0).double(), rows.amax().clamp(min=0).double()
    scale = (high - low) / _HIGHEST_CODE
    scale = torch.where((scale.float() == 0) | torch.isinf(1 / scale.float()), 0.1, scale)
    is_small = scale < _LEAST_SCALE
    widened = _LEAST_SCALE / scale
    low = torch.where(is_small, torch.where(high == 0, -_LEAST_SCALE * _HIGHEST_CODE, low * widened), low)
    high = torch.where(is_small, torch.where(low == 0, _LEAST_SCALE * _HIGHEST_CODE, high * widened), high)
    scale = torch.where(is_small, _LEAST_SCALE, scale)
    # Of the two ends of the range the one is exact whose error is smaller.
    from_low, from_high = -low / scale, _HIGHEST_CODE - high / scale
    is_low = (low / scale).abs() < _HIGHEST_CODE + (high / scale).abs()
    return scale.float(), torch.where(is_low, from_low, from_high).round().clamp(0, _HIGHEST_CODE).float()
