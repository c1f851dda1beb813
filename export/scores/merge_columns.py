"""Remove copies from a dense part: columns of the embeddings that are cut apart only to be joined again."""

import copy
import operator
import sys
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import fx

from export.capture.trace import EMBEDDINGS
from export.scores.written_inputs import cast_of_input

_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat)
_SPLITS = (torch.split, torch.functional.split, torch.ops.aten.split_with_sizes)
_NARROWS = (torch.narrow, torch.ops.aten.narrow)
# Calls that return all of a tensor, which is float32.
_WHOLE = ((torch.ops.aten.slice, 0, 0, sys.maxsize), (torch.ops.aten.to, torch.float32))
# The columns of the embeddings that a node computes, [first, last).
_Spans = dict[fx.Node, tuple[int, int]]


def merge_adjacent_columns(module: fx.GraphModule, width: int) -> fx.GraphModule:
    """A dense part that joins adjacent columns of the embeddings without a copy of each.

    A loop over the keys of a KeyedTensor makes such copies. The joined columns may share memory with the embeddings.

    Args:
        module: shares its weights with the result.
        width: columns of the embeddings.
    """
    module = fx.GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    nodes = list(module.graph.nodes)
    embeddings = cast_of_input(next(node for node in nodes if node.target == EMBEDDINGS))
    spans: _Spans = {embeddings: (0, width)}
    for node in nodes:
        if (span := _span_of(node, spans)) is not None:
            spans[node] = span
        elif node.target in _JOINS:
            _merge_join(node, embeddings, spans)
    for node in reversed(nodes):
        if (node in spans or node.target in _SPLITS) and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


def _span_of(node: fx.Node, spans: _Spans) -> tuple[int, int] | None:
    """The columns of the embeddings that a node takes, or None if it does anything else or they are unknown."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and getattr(source, "target", None) in _SPLITS:
        return _span_of_split(source, node.args[1], spans)
    if not isinstance(source, fx.Node) or source not in spans:
        return None
    if (node.target, *node.args[1:]) in _WHOLE:
        return spans[source]
    if node.target not in _NARROWS or _argument(node, 1, "dim") not in (1, -1):
        return None
    start = _argument(node, 2, "start")
    length = _argument(node, 3, "length")
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:  # a negative start counts from the end
        return None
    first = spans[source][0] + start
    return first, first + length


def _span_of_split(split: fx.Node, number: Any, spans: _Spans) -> tuple[int, int] | None:
    """The columns of one part of a split, or None if they are unknown."""
    source: Any = split.args[0] if split.args else None
    sizes = _argument(split, 1, "split_size_or_sections")
    is_known = isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in (number, *sizes))
    if not is_known or source not in spans or _argument(split, 2, "dim") not in (1, -1):
        return None
    ends = accumulate(sizes, initial=spans[source][0])
    return [*pairwise(ends)][int(number)]


def _argument(node: fx.Node, number: int, name: str) -> Any:
    return node.args[number] if number < len(node.args) else node.kwargs.get(name)


def _merge_join(join: fx.Node, embeddings: fx.Node, spans: _Spans) -> None:
    """Replace a join by one of fewer parts: each run of adjacent columns is one part."""
    parts = _argument(join, 0, "tensors")
    if not isinstance(parts, list | tuple) or _argument(join, 1, "dim") not in (1, -1):
        return
    runs: list[list[fx.Node]] = []
    for part in parts:
        if runs and part in spans and spans.get(runs[-1][-1], (0, -1))[1] == spans[part][0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    if len(runs) == len(parts):
        return
    with join.graph.inserting_before(join):
        merged = [run[0] if len(run) == 1 else _narrow_run(run, embeddings, spans) for run in runs]
        if len(merged) > 1:
            joined = join.graph.call_function(cast(Any, join.target), (merged, 1))
        else:  # a join has contiguous rows
            joined = join.graph.call_method("contiguous", (merged[0],))
    join.replace_all_uses_with(joined)
    join.graph.erase_node(join)


def _narrow_run(run: list[fx.Node], embeddings: fx.Node, spans: _Spans) -> fx.Node:
    """Adjacent columns as one view of the embeddings."""
    first = spans[run[0]][0]
    last = spans[run[-1]][1]
    if (first, last) == spans[embeddings]:
        return embeddings
    return embeddings.graph.call_function(torch.narrow, (embeddings, 1, first, last - first))
