"""The steps for a block of rows, compiled where TorchScript works, so that Python's lock is taken once for all.

On virtual machines, a thread takes 50 to 100 µs to wake up, and each step takes as long. If four threads call the
steps one by one, they keep only one core busy (docs/decisions/0006-reading-and-writing-rows.md).
"""

import math

import fbgemm_gpu  # noqa: F401  the operator has to be known when it is compiled
import torch
from torch import Tensor

from serving.torchscript import torchscript, torchscript_error


def code(rows: Tensor, bits: int, headers: Tensor, halves: Tensor) -> tuple[Tensor, float, float]:
    """Quantize rows by FBGEMM's own operator. Scale and bias are moved before the codes, where its kernel reads them.

    Args:
        rows: float32 or float16 [n, dim], contiguous.
        bits: of a code.
        headers: uint8 [n, 4], contiguous. The scales and biases are written to it.
        halves: float16 [n, 2], a view of `headers`.

    Returns:
        uint8 [n, row bytes]; and the sums of `rows` and of `halves`, which show whether all numbers are finite.
    """
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    width = headers.size(1)
    headers.copy_(fused[:, -width:])
    stored = torch.cat([headers, fused[:, :-width]], dim=1)
    return stored, float(rows.sum(dtype=torch.float32)), float(halves.sum(dtype=torch.float32))


def squared(numbers: Tensor) -> float:
    """The sum of the squares of numbers, of any shape."""
    flat = numbers.reshape(-1)
    total = float(torch.dot(flat, flat))
    if math.isfinite(total):
        return total
    flat = flat.to(torch.float64)  # squares beyond FP32
    return float(torch.dot(flat, flat))


def compare(a: Tensor, b: Tensor, error: Tensor) -> tuple[Tensor, int, list[float]]:
    """Compare two versions of some rows, float32 or float64 [n, dim], n > 0.

    Args:
        a: one version.
        b: the other.
        error: in the dtype of a − b, contiguous, is overwritten; it may be b.

    Returns:
        The largest |a − b| of each row [n]; the first row with the largest of all; that, and the sums of |a − b|,
        (a − b)², a² and b².
    """
    squared_a, squared_b = squared(a), squared(b)
    torch.sub(a, b, out=error)
    squared_error = squared(error)
    error.abs_()
    worst = error.amax(1)
    return worst, int(worst.argmax()), [float(worst.max()), float(error.sum()), squared_error, squared_a, squared_b]


def unpack(codes: Tensor, bits: int, scales_and_biases: Tensor, numbers: Tensor) -> None:
    """Dequantize codes to `numbers`, with aten's arithmetic, which shares no code with FBGEMM.

    Args:
        codes: uint8 [n, dim · bits / 8], the lower bits of a byte first.
        bits: of a code.
        scales_and_biases: float32 [n, 2].
        numbers: float32 [n, dim], contiguous, is written.
    """
    step = max(1, 65_536 // numbers.size(1))  # 256 KiB stay in a core's cache between the steps
    for start in range(0, numbers.size(0), step):
        part = numbers[start : start + step]
        packed = codes[start : start + step]
        if bits == 8:
            part.copy_(packed)
        else:
            spread = part.view(part.size(0), -1, 8 // bits)
            for position in range(8 // bits):
                shifted = packed.bitwise_right_shift(position * bits)
                spread[:, :, position].copy_(shifted.bitwise_and((1 << bits) - 1))
        part.mul_(scales_and_biases[start : start + step, :1]).add_(scales_and_biases[start : start + step, 1:])


def bounds_of_codes(rows: Tensor, halves: Tensor, largest_code: int, units: tuple[float, float, float]) -> Tensor:
    """The largest error of an element of each row that was stored as codes.

    A number is rounded to its nearest code, at most half a step away. Scale and bias are rounded to FP16. The rounded
    scale moves the largest code by its own size times half a unit of FP16. The rounded bias moves all codes by half a
    unit of the bias.

    Args:
        rows: float32 [n, dim].
        halves: float16 [n, 2], scales and biases.
        largest_code: of the dtype.
        units: FP16_UNIT, FP16_SUBNORMAL and FP32_UNIT of `serving.bundle.formats`.

    Returns:
        float64 [n].
    """
    fp16_unit, fp16_subnormal, fp32_unit = units
    doubles = halves.to(torch.float64)
    scale, bias = doubles[:, 0].clone(), doubles[:, 1].abs()
    # FBGEMM stores the scale 1 where the step is 0 in FP16: then all numbers of a row become its bias.
    replaced = (scale == 1).nonzero().flatten()
    if replaced.numel() > 0:
        low, high = torch.aminmax(rows.index_select(0, replaced), dim=1)
        scale.index_copy_(0, replaced, (high.to(torch.float64) - low.to(torch.float64)) / largest_code)
    bounds = scale * (0.5 + largest_code * fp16_unit) + (largest_code + 1) * fp16_subnormal
    # The op computes in FP32: a few of its units of the largest number in the row.
    return bounds + (bias * fp16_unit + 4 * fp32_unit * (bias + largest_code * scale))


def coarse(
    rows: Tensor, worst: Tensor, halves: Tensor, largest_code: int, units: tuple[float, float, float]
) -> tuple[Tensor, Tensor]:
    """Find the rows that FP16's smallest numbers make coarse: their scale or bias is rounded to few digits, or to 0.

    They moved by twice as much as half a step and rounding to 11 bits can move them, and by more than a 32nd of their
    largest element.

    Args:
        worst: float32 [n], the largest error of each row.
        rows, halves, largest_code, units: as `bounds_of_codes`.

    Returns:
        Their numbers, int64 [k], and the largest |element| of each, float64 [k].
    """
    fp16_unit, fp16_subnormal, fp32_unit = units
    scale = halves[:, 0].to(torch.float32).abs()
    # Few rows are looked at. A scale of at least 8 smallest numbers is at most 6 % off, and so is the step.
    subnormal = (scale < 2048 * fp16_subnormal) & (worst > 0.9 * scale)
    suspects = (subnormal | (scale < 16 * fp16_subnormal) | (scale == 1)).nonzero().flatten()
    if suspects.numel() == 0:
        return suspects, torch.empty(0, dtype=torch.float64)
    lows, highs = torch.aminmax(rows.index_select(0, suspects), dim=1)
    low, high = lows.to(torch.float64), highs.to(torch.float64)
    step = (high - low) / largest_code
    magnitude = torch.maximum(low.abs(), high.abs())
    explained = step * (0.5 + largest_code * fp16_unit) + low.abs() * fp16_unit + 8 * fp32_unit * magnitude
    moved = worst.index_select(0, suspects).to(torch.float64)
    chosen = ((moved > 2 * explained) & (moved > magnitude / 32)).nonzero().flatten()
    return suspects.index_select(0, chosen), magnitude.index_select(0, chosen)


def compare_codes(
    rows: Tensor, codes: Tensor, bits: int, halves: Tensor, scratch: Tensor, units: tuple[float, float, float]
) -> tuple[list[float], list[float], list[int], Tensor, Tensor, Tensor]:
    """Compare float rows with codes that were stored for them.

    Args:
        rows: float32 [n, dim], n > 0.
        codes: uint8 [n, dim · bits / 8].
        bits: of a code.
        halves: float16 [n, 2], scales and biases.
        scratch: float32 [n, dim], contiguous, is overwritten.
        units: as `bounds_of_codes`.

    Returns:
        The sums of `compare`; the largest |element| of `rows`, the largest of `bounds_of_codes`, and the largest
        error of rows that are not coarse; the worst row, and the first row that moved further than its bound, or -1;
        and the coarse rows: their numbers, how far they moved, and their largest |element|.
    """
    unpack(codes, bits, halves.to(torch.float32), scratch)
    worst, worst_row, sums = compare(rows, scratch, scratch)
    low, high = torch.aminmax(rows)
    largest_code = (1 << bits) - 1
    bounds = bounds_of_codes(rows, halves, largest_code, units)
    moved = torch.logical_not((worst <= bounds) & torch.isfinite(worst))  # NaN and infinity, too
    unexplained = int(moved.to(torch.uint8).argmax()) if bool(moved.any()) else -1
    numbers, magnitudes = coarse(rows, worst, halves, largest_code, units)
    usual = sums[0] if numbers.numel() == 0 else float(worst.index_fill(0, numbers, 0.0).max())
    figures = [max(float(high), -float(low)), float(bounds.max()), usual]
    return sums, figures, [worst_row, unexplained], numbers, worst.index_select(0, numbers), magnitudes


if torchscript_error() is None:  # without it they are called as they are
    with torchscript():
        code = torch.jit.script(code)
        squared = torch.jit.script(squared)
        compare = torch.jit.script(compare)
        unpack = torch.jit.script(unpack)
        bounds_of_codes = torch.jit.script(bounds_of_codes)
        coarse = torch.jit.script(coarse)
        compare_codes = torch.jit.script(compare_codes)
