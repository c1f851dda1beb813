"""The operators that keep apart what is the same for all items."""

import operator
from collections.abc import Mapping

import torch

from export.user_side import arithmetic, indices, matrices, shapes
from export.user_side.call import Rule


def rule_for(target: object) -> Rule | None:
    """The rule for an operator. None: it gets a row for each item of all that it takes."""
    rule = _RULES.get(str(target))
    if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return arithmetic.pointwise
    return rule


_RULES: Mapping[str, Rule] = {
    "aten.add.Tensor": arithmetic.added(1),
    "aten.sub.Tensor": arithmetic.added(-1),
    "aten.mul.Tensor": arithmetic.multiplied,
    "aten.slice.Tensor": shapes.take_slice,
    "aten.narrow.default": shapes.narrow,
    "aten.split.Tensor": shapes.split,
    "aten.split_with_sizes.default": shapes.split,
    "aten.chunk.default": shapes.chunk,
    "aten.unbind.int": shapes.unbind,
    "aten.select.int": shapes.select,
    "aten.squeeze.default": shapes.squeeze,
    "aten.squeeze.dim": shapes.squeeze,
    "aten.squeeze.dims": shapes.squeeze,
    "aten.unsqueeze.default": shapes.unsqueeze,
    "aten.permute.default": shapes.permute,
    "aten.transpose.int": shapes.permute,
    "aten.t.default": shapes.permute,
    "aten.expand.default": shapes.expand,
    "aten.repeat.default": shapes.expand,
    "aten.cat.default": shapes.cat,
    "aten.stack.default": shapes.stack,
    "aten.index.Tensor": indices.index,
    "aten.index_select.default": indices.index_select,
    "aten.linear.default": matrices.linear,
    "aten.addmm.default": matrices.addmm,
    "aten.matmul.default": matrices.matmul,
    "aten.mm.default": matrices.matmul,
    "aten.bmm.default": matrices.matmul,
    "aten.sum.dim_IntList": matrices.total,
    str(operator.getitem): shapes.getitem,
    **dict.fromkeys(
        (
            "aten.view.default",
            "aten.reshape.default",
            "aten._unsafe_view.default",
            "aten.flatten.using_ints",
        ),
        shapes.view,
    ),
    **dict.fromkeys(("aten.to.dtype", "aten._to_copy.default"), arithmetic.pointwise),
    **dict.fromkeys(
        ("aten.contiguous.default", "aten.alias.default", "aten.clone.default", "aten.detach.default",
         "aten.dropout.default", "aten.lift_fresh_copy.default"),
        shapes.same,
    ),
}  # fmt: skip
