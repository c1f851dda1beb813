"""Products of large matrices in a dense part, by the library that is fast on this processor.

torch uses MKL for them. On AMD's processors, MKL runs its slowest code, and oneDNN, which torch also has, takes half
of the time. But each call of oneDNN costs 10 µs, and each new number of rows costs half a millisecond once and keeps
up to 2 MB. So oneDNN is called with only a few different numbers of rows. MKL still computes small products, and the
last rows of large ones. On other processors nothing is changed.
"""

import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

# Minimum numbers in the weight of a layer for which oneDNN is faster.
_LARGE_WEIGHT = 1 << 14
_PROCESSORS = Path("/proc/cpuinfo")


def prefer_onednn(program: "torch.jit.ScriptModule", *, takes_weights: bool) -> None:
    """Make a frozen program compute products of large FP32 weights by oneDNN, if the processor is AMD's.

    Args:
        program: a program that was never called. It is changed in place.
        takes_weights: whether weights are inputs of the program, with the same shapes in all calls.
    """
    if _has_faster_onednn():
        replace_large_products(program.graph, takes_weights=takes_weights)


def prefer_onednn_in_graph(graph: fx.Graph, weights: Sequence[Any]) -> None:
    """Make the graph of an exported program compute products of large FP32 weights by oneDNN, as `prefer_onednn`.

    Args:
        graph: the graph, which is changed in place.
        weights: the values of its first inputs.
    """
    if _has_faster_onednn():
        replace_large_products_in_graph(graph, weights)


def _has_faster_onednn() -> bool:
    return _is_amd(_PROCESSORS) and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _is_amd(processors: Path) -> bool:
    """Whether proc_cpuinfo(5) names AMD, on x86-64."""
    if platform.machine() != "x86_64" or not processors.exists():
        return False
    return re.search(r"^vendor_id\s*:\s*AuthenticAMD$", processors.read_text(), re.MULTILINE) is not None


def replace_large_products(graph: Any, *, takes_weights: bool = False) -> int:
    """Replace each `linear` whose weight is a large FP32 constant, or an input of the graph.

    Args:
        graph: a graph of TorchScript, which is changed in place.
        takes_weights: whether weights may be inputs, whose sizes are checked in each call.

    Returns:
        The number of replaced nodes.
    """
    replaced = 0
    for node in graph.findAllNodes("aten::linear"):
        inputs = list(node.inputs())
        if _is_large(inputs[1].toIValue()):
            replacement = linear
        elif takes_weights and inputs[1].node().kind() == "prim::Param":
            replacement = linear_if_large
        else:
            continue
        graph.setInsertPoint(node)
        (inserted,) = graph.insertGraph(_scripted(replacement).inlined_graph, inputs)
        node.output().replaceAllUsesWith(inserted)
        node.destroy()
        replaced += 1
    return replaced


def replace_large_products_in_graph(graph: fx.Graph, weights: Sequence[Any]) -> int:
    """Replace each `aten.linear` whose weight is a large FP32 tensor by `linear`. Returns the number of these."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    large = {node for node, weight in zip(placeholders, weights, strict=False) if _is_large(weight)}
    products = [
        node for node in graph.nodes if node.target is torch.ops.aten.linear.default and node.args[1] in large
    ]
    for node in products:
        node.target = linear
        node.args = (*node.args, None)[:3]
    return len(products)


def _is_large(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 and weight.numel() >= _LARGE_WEIGHT


@cache
def _scripted(function: Any) -> Any:
    return torch.jit.script(function)


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` of FP32, in TorchScript.

    oneDNN computes blocks of 64, 128, 256, 512 and 1,024 rows, and MKL the remaining rows, fewer than 64.
    """
    columns = weight.size(1)
    row_count = rows.numel() // columns
    if row_count < 64:
        return torch.nn.functional.linear(rows, weight, bias)
    if row_count == 64 or row_count == 128 or row_count == 256 or row_count == 512 or row_count == 1024:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    if columns < weight.size(0):  # joining parts costs more than oneDNN saves
        return torch.nn.functional.linear(rows, weight, bias)
    flat = rows.reshape(-1, columns)
    parts: list[torch.Tensor] = []
    start, size = 0, 1024
    while size >= 64:
        while start + size <= row_count:
            block = flat[start : start + size]
            parts.append(torch.ops.mkldnn._linear_pointwise(block, weight, bias, "none", [], ""))
            start += size
        size = size // 2
    if start < row_count:
        parts.append(torch.nn.functional.linear(flat[start:], weight, bias))
    shape = list(rows.size())
    shape[-1] = weight.size(0)
    return torch.cat(parts).view(shape)


def linear_if_large(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` if the weight is a large FP32 tensor, in TorchScript, which cannot read `_LARGE_WEIGHT`."""
    if weight.numel() < 16384 or weight.dtype != torch.float32:
        return torch.nn.functional.linear(rows, weight, bias)
    return linear(rows, weight, bias)
