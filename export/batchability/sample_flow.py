"""Follow the samples of a batch through a graph of core ATen, node by node, up to its outputs."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from export.batchability.jagged import JaggedLengths, axis_of_jagged, axis_of_repeated
from export.batchability.operator_rules import output_axis
from export.batchability.sample_axis import (
    OperatorCall,
    SampleAxis,
    can_hold_samples,
    is_sample_range,
    is_symbolic_number,
    rows_per_sample,
)
from export.capture.graph_nodes import nodes_computing
from export.trained.source_location import short_line_of


def first_mixing_node(
    graph: fx.Graph,
    keys: Mapping[str, str | None],
    lengths: Mapping[str, str | int],
    by_id: Mapping[int, str],
) -> str | None:
    """Describe the first node that may mix samples, or return None.

    Args:
        graph: of core ATen.
        keys: for each input, the key whose ids it has a row for, or None if it has a row for each sample.
        lengths: for each input with the number of ids of a key, that key, or the number of ids in every sample.
        by_id: the key of each output with a row for each id of a key, by the number of the output.
    """
    flow = _SampleFlow(graph, keys, lengths)
    output = next(node for node in graph.nodes if node.op == "output")
    # Other nodes check numbers. If such a check fails for merged requests, they are scored one by one.
    needed = nodes_computing(output)
    for node in graph.nodes:
        if node in needed and node.op == "call_function" and not flow.follow(node):
            return f"{node.target}{short_line_of(node)}"
    for number, node in enumerate(output.args[0]):
        if not flow.has_all_rows(node, by_id.get(number)):
            return f"an answer whose rows are not samples{short_line_of(node)}"
    return None


class _SampleFlow:
    """The sample axis of each node of a graph.

    Args:
        graph, keys, lengths: as `first_mixing_node`.
    """

    def __init__(self, graph: fx.Graph, keys: Mapping[str, str | None], lengths: Mapping[str, str | int]) -> None:
        inputs = [node for node in graph.nodes if node.name in keys]
        self._samples = inputs[0].meta["val"].shape[0].node.expr
        # The symbols of the number of rows: of samples (None), and of the ids of each key.
        self._row_counts: dict[str | None, set[Any]] = {None: {self._samples}}
        self._axes: dict[fx.Node, SampleAxis] = {}
        for node in inputs:
            size = node.meta["val"].shape[0]
            key = keys[node.name]
            count = rows_per_sample(size, self._samples)
            if key is not None and count is None:
                self._row_counts.setdefault(key, set()).add(size.node.expr)
            self._axes[node] = SampleAxis(0, key=key) if count is None else SampleAxis(0, count)
        self._lengths = JaggedLengths(
            {node: lengths[node.name] for node in inputs if node.name in lengths}, self._samples
        )

    def follow(self, node: fx.Node) -> bool:
        """Record the sample axis of a node. False if the node may mix samples."""
        if is_symbolic_number(node) or is_sample_range(node, self._samples) or self._is_same_for_all(node):
            return True
        size = self._lengths.of_sample_numbers(node)
        if isinstance(size, str):
            self._row_counts.setdefault(size, set()).add(node.meta["val"].shape[0].node.expr)
        if size is not None or self._lengths.is_offsets(node):
            return True
        axis = self._axis_after(node)
        if axis is None:
            return False
        shape = getattr(node.meta["val"], "shape", None)
        row_counts = self._row_counts.get(axis.key, set())
        if shape is not None and not any(can_hold_samples(axis, shape, count) for count in row_counts):
            return False
        self._axes[node] = axis
        return True

    def has_all_rows(self, output: fx.Node, key: str | None) -> bool:
        """Whether an output has a row for each sample, or for each id of a key, in order."""
        size = output.meta["val"].shape[0]
        if key in self._row_counts:
            expected = SampleAxis(0, key=key)
            has_all = any(rows_per_sample(size, count) == 1 for count in self._row_counts[key])
        else:  # a key with a fixed number of ids in each sample
            count = rows_per_sample(size, self._samples)
            expected = SampleAxis(0, count or 1)
            has_all = count is not None
        return has_all and self._axes.get(output) == expected

    def _is_same_for_all(self, node: fx.Node) -> bool:
        """Whether a node is known, and computed from nothing that differs between samples or batches."""
        return _is_functional(node) and not any(
            source in self._axes
            or is_symbolic_number(source)
            or is_sample_range(source, self._samples)
            or self._lengths.is_offsets(source)
            or self._lengths.of_sample_numbers(source) is not None
            for source in node.all_input_nodes
        )

    def _axis_after(self, node: fx.Node) -> SampleAxis | None:
        """The sample axis after a node, or None if it may mix samples."""
        sources = node.all_input_nodes
        if node.target is operator.getitem:
            return self._axes[sources[0]]
        if not _uses_sample_range_as_index(node, self._samples):
            return None  # a merged request has other sample numbers than a single one
        if str(node.target).startswith("fbgemm."):
            return axis_of_jagged(node, self._axes, self._lengths)
        if any(self._lengths.of_sample_numbers(source) is not None for source in sources):
            return axis_of_repeated(node, self._axes, self._lengths)
        if not _is_functional(node) or any(map(self._lengths.is_offsets, sources)):
            return None  # as numbers, offsets count the ids of the samples before
        axes = {source: self._axes[source] for source in sources if source in self._axes}
        keys = {axis.key for axis in axes.values()}
        if len(keys) > 1:
            return None  # the number of ids in a sample may differ between keys
        # The rules keep ids apart as they keep samples apart.
        plain_axes = {source: replace(axis, key=None) for source, axis in axes.items()}
        call = OperatorCall(node, plain_axes, self._samples)
        has_symbolic_size = any(map(is_symbolic_number, sources))
        axis = output_axis(cast(torch._ops.OpOverload, node.target), call, has_symbolic_size=has_symbolic_size)
        return axis and replace(axis, key=next(iter(keys), None))


def _uses_sample_range_as_index(node: fx.Node, samples: Any) -> bool:
    """Whether a node takes arange(B) only as in x[arange(B), …], or not at all."""
    ranges = [source for source in node.all_input_nodes if is_sample_range(source, samples)]
    if not ranges:
        return True
    if str(node.target) != "aten.index.Tensor":
        return False
    source = node.args[0]
    indices = cast(Sequence[Any], node.args[1])
    return ranges == [indices[0]] and ranges[0] not in (source, *indices[1:])


def _is_functional(node: fx.Node) -> bool:
    """Whether a node is an operator of ATen whose output follows from its arguments, and that changes none."""
    op = node.target
    return op is operator.getitem or (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
    )
