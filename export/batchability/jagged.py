"""Jagged tensors in a graph of core ATen: which offsets are those of a key, and FBGEMM's operators that take them.

A jagged tensor has a row for each id. FBGEMM's operators find the ids of a sample by offsets. They keep samples apart
where the rows and the offsets are of one key.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from export.batchability.sample_axis import Rows, is_number

_OFFSETS = "fbgemm.asynchronous_complete_cumsum.default"
# (values, offsets, …): they answer with rows and the offsets that they were given.
_ANSWERING_OFFSETS = (
    "fbgemm.jagged_dense_elementwise_add_jagged_output.default", "fbgemm.jagged_dense_elementwise_mul.default",
    "fbgemm.jagged_softmax.default",
)  # fmt: skip
# What hands on the numbers of a tensor [B], perhaps with dimensions of size 1.
_SAME = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.alias.default",
    "aten.clone.default", "aten._to_copy.default",
    "aten.select.int", "aten.squeeze.dims", "aten.squeeze.dim", "aten.unsqueeze.default",
)  # fmt: skip
# They have all lengths. Others do not have large ones.
_DTYPES = (torch.int32, torch.int64)


class Counts:
    """Which steps of a graph are the lengths, or offsets, of the ids of a key; or of so many ids in each sample.

    Args:
        lengths: the inputs with lengths, and their keys; or how many ids each sample has.
        samples: the symbol of B.
    """

    def __init__(self, lengths: Mapping[fx.Node, str | int], samples: Any) -> None:
        self._lengths, self._samples = lengths, samples

    def is_offsets(self, node: fx.Node) -> bool:
        """Whether a step is offsets of known lengths."""
        return self.of_offsets(node) is not None

    def of_offsets(self, node: Any) -> str | int | None:
        """The key whose offsets a step is, or how many ids each sample has. None: it is something else."""
        node = _as_given(node)
        is_sum = isinstance(node, fx.Node) and str(node.target) == _OFFSETS
        return self._of_lengths(node.args[0]) if is_sum else None

    def of_numbering(self, node: Any) -> str | int | None:
        """The key whose ids a step numbers by their samples: repeat_interleave of lengths. None: it is another."""
        is_numbering = isinstance(node, fx.Node) and str(node.target) == "aten.repeat_interleave.Tensor"
        return self._of_lengths(node.args[0]) if is_numbering else None

    def _of_lengths(self, node: Any) -> str | int | None:
        while self._has_one_of_each_sample(node):
            if node in self._lengths:
                return self._lengths[node]
            if str(node.target) == "aten.full.default":
                return node.args[1] if isinstance(node.args[1], int) else None
            if str(node.target) not in _SAME or node.meta["val"].dtype not in _DTYPES:
                return None
            node = node.args[0]
        return None

    def _has_one_of_each_sample(self, node: Any) -> bool:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor):
            return False
        sizes = [each for each in value.shape if not (isinstance(each, int) and each == 1)]
        return len(sizes) == 1 and isinstance(sizes[0], torch.SymInt) and sizes[0].node.expr == self._samples


def _as_given(node: Any) -> Any:
    """Offsets as an operator was given them, where it answers with them beside its rows: (rows, [offsets])."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return node
    source: Any
    place: Any
    source, place = node.args
    if isinstance(source, fx.Node) and str(source.target) in _ANSWERING_OFFSETS and place == 1:
        return _as_given(source.args[1])
    offsets = _as_given(source)
    return _as_given(offsets[place]) if isinstance(offsets, list | tuple) else node


def rows_of_jagged(node: fx.Node, rows: Mapping[fx.Node, Rows], counts: Counts) -> Rows | None:
    """Where the samples are behind one of FBGEMM's operators; None: it may let them meet."""
    name = str(node.target).removeprefix("fbgemm.").partition(".")[0]
    rule = _RULES.get(name)
    if rule is None or any(map(is_number, node.all_input_nodes)):
        return None  # a size that is made of the number of ids, or of samples
    return rule(_Use(node, rows, counts))


def rows_of_numbered(node: fx.Node, rows: Mapping[fx.Node, Rows], counts: Counts) -> Rows | None:
    """Where the samples are behind a step that takes the row of its sample for each id; None: it is another step."""
    name, args = str(node.target), node.args
    if name == "aten.index_select.default":
        source, dim, numbers = args
    elif name == "aten.index.Tensor" and isinstance(args[1], list | tuple) and len(args[1]) == 1:
        source, dim, numbers = args[0], 0, args[1][0]
    else:
        return None
    of = counts.of_numbering(numbers)
    if of is None or dim != 0 or not isinstance(source, fx.Node) or rows.get(source) != Rows(0):
        return None
    return Rows(0, of) if isinstance(of, int) else Rows(0, key=of)


class _Use:
    def __init__(self, node: fx.Node, rows: Mapping[fx.Node, Rows], counts: Counts) -> None:
        self._args, self._rows, self._counts = node.args, rows, counts

    def is_dense(self, position: int) -> bool:
        """Whether an argument has a row for each sample."""
        return self._at(position) == Rows(0)

    def are_dense(self, position: int) -> bool:
        """Whether each tensor of a list has a row for each sample."""
        given: Any = self._args[position]
        return all(self._rows.get(each) == Rows(0) for each in given)

    def is_jagged(self, position: int, offsets: int) -> bool:
        """Whether an argument has the rows of the ids that another one has the offsets of."""
        of = self._of(offsets)
        found = self._at(position)
        return of is not None and found == (Rows(0, of) if isinstance(of, int) else Rows(0, key=of))

    def jagged(self, offsets: int) -> Rows | None:
        """The place of samples in rows of ids."""
        of = self._of(offsets)
        return None if of is None else Rows(0, of) if isinstance(of, int) else Rows(0, key=of)

    def _at(self, position: int) -> Rows | None:
        given: Any = self._args[position]
        return self._rows.get(given) if isinstance(given, fx.Node) else None

    def _of(self, position: int) -> str | int | None:
        given: Any = self._args[position]
        if isinstance(given, list | tuple):
            given = given[0] if len(given) == 1 else None
        return self._counts.of_offsets(given)


def _to_dense(use: _Use) -> Rows | None:
    return Rows(0) if use.is_jagged(0, 1) else None


def _to_jagged(use: _Use) -> Rows | None:
    return use.jagged(1) if use.is_dense(0) else None


def _both(use: _Use) -> Rows | None:
    """(values, offsets, dense): numbers of both at the same places."""
    return use.jagged(1) if use.is_jagged(0, 1) and use.is_dense(2) else None


def _bmm(use: _Use) -> Rows | None:
    """(values, offsets, matrices [B, …], longest): rows of a sample by the matrix of that sample."""
    return use.jagged(1) if use.is_jagged(0, 1) and use.is_dense(2) else None


def _softmax(use: _Use) -> Rows | None:
    return use.jagged(1) if use.is_jagged(0, 1) else None


def _jagged_bmm(use: _Use) -> Rows | None:
    """(values, values, offsets, longest): a matrix for each sample."""
    return Rows(0) if use.is_jagged(0, 2) and use.is_jagged(1, 2) else None


def _columns(use: _Use) -> Rows | None:
    """(tensor, …): columns of a tensor with a row for each sample, in another order."""
    return Rows(0) if use.is_dense(0) else None


def _regrouped(use: _Use) -> Rows | None:
    """(tensors, …): columns of tensors with a row for each sample, in another order."""
    return Rows(0) if use.are_dense(0) else None


_RULES: Mapping[str, Callable[[_Use], Rows | None]] = {
    **dict.fromkeys(("jagged_to_padded_dense", "jagged_to_padded_dense_forward"), _to_dense),
    **dict.fromkeys(("jagged_2d_to_dense", "jagged_1d_to_dense"), _to_dense),
    **dict.fromkeys(("dense_to_jagged", "dense_to_jagged_forward"), _to_jagged),
    **dict.fromkeys(("jagged_dense_elementwise_add_jagged_output", "jagged_dense_elementwise_mul"), _both),
    **dict.fromkeys(("permute_pooled_embs", "permute_pooled_embs_auto_grad"), _columns),
    **dict.fromkeys(
        ("permute_multi_embedding", "permute_multi_embedding_function", "regroup_keyed_tensor"), _regrouped
    ),
    "jagged_dense_bmm": _bmm,
    "jagged_jagged_bmm": _jagged_bmm,
    "jagged_softmax": _softmax,
}
