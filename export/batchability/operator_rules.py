"""The operators that are known to keep the samples of a batch apart, and where they leave them.

An operator that is not in the table may let samples meet, and so may one that is used in another way than its rule
knows.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from export.batchability.sample_axis import Call, Rows, per_sample

# The rules: where the samples of an answer are. None: this use of the operator is not known to keep them apart.


def _pointwise(call: Call) -> Rows | None:
    """Each number of the answer is made of the numbers at its place, where shapes are broadcast."""
    broadcast: Any = torch.broadcast_shapes
    tensors = {name: each for name, each in call.given.items() if isinstance(each, fx.Node)}
    if not isinstance(call.out, Tensor):
        return None
    if list(call.out.shape) != [*broadcast(*(call.shape(name) for name in tensors))]:
        return None
    return _same(_aligned(call, name) for name in tensors)


def _aligned(call: Call, name: str) -> Rows | None:
    """Where the samples of an argument come to be in an answer that it is broadcast to."""
    found = call.rows(name)
    return found and Rows(found.dim + call.out.ndim - len(call.shape(name)), found.block)


def _same(found: Iterable[Rows | None]) -> Rows | None:
    """Where the samples of several are, if it is the same place."""
    places = {each for each in found if each is not None}
    return places.pop() if len(places) == 1 else None


def _along(*names: str) -> Callable[[Call], Rows | None]:
    """A rule for operators that work along named dimensions and keep them. The samples must be along another."""

    def rule(call: Call) -> Rows | None:
        found, dims = call.rows("self"), [dim for name in names for dim in call.dims(name)]
        others = [name for name in call.given if name != "self"]
        return found if found and dims and found.dim not in dims and call.is_constant(*others) else None

    return rule


def _over(call: Call) -> Rows | None:
    """Operators that make one number of those along some dimensions, which then are gone unless they are kept."""
    found, dims = _along("dim")(call), call.dims()
    if found is None or call.given.get("keepdim"):
        return found
    return Rows(found.dim - sum(dim < found.dim for dim in dims), found.block)


def _squeeze(call: Call) -> Rows | None:
    found, shape = _along("dim")(call), call.shape("self")
    gone = [dim for dim in call.dims() if isinstance(shape[dim], int) and shape[dim] == 1]
    return found and Rows(found.dim - sum(dim < found.dim for dim in gone), found.block)


def _unsqueeze(call: Call) -> Rows | None:
    found = call.rows("self")
    return found and Rows(found.dim + (call.given["dim"] % call.out.ndim <= found.dim), found.block)


def _permute(call: Call) -> Rows | None:
    found = call.rows("self")
    return found and Rows(call.dims("dims").index(found.dim), found.block)


def _view(call: Call) -> Rows | None:
    """The n-th number in the order of rows belongs to sample (n // run) % B, before and behind a view."""
    found = call.rows("self")
    if found is None:
        return None
    run = found.block * math.prod(call.shape("self")[found.dim + 1 :])
    for dim, size in enumerate(call.out.shape):
        if isinstance(size, torch.SymInt):
            behind = math.prod(call.out.shape[dim + 1 :])
            whole = isinstance(behind, int) and behind > 0 and run % behind == 0
            return Rows(dim, run // behind) if whole and run else None
    return None


def _expand(call: Call) -> Rows | None:
    if call.rows("self"):
        return _aligned(call, "self")
    return _alike(call)


def _repeat(call: Call) -> Rows | None:
    if (found := _aligned(call, "self")) is None:
        return _alike(call)
    is_fixed = all(isinstance(each, int) for each in call.given["repeats"])
    return found if is_fixed else None


def _alike(call: Call) -> Rows | None:
    """What is made for any number of samples, alike for each of them."""
    along = [dim for dim, size in enumerate(call.out.shape) if isinstance(size, torch.SymInt)]
    if len(along) != 1 or isinstance(call.given.get("fill_value"), fx.Node):
        return None
    (dim,) = along
    symbols = call.out.shape[dim].node.expr.free_symbols
    if len(symbols) != 1:
        return None  # a size that is made of several
    return Rows(dim, per_sample(call.out.shape[dim], *symbols) or 0)


def _slice(call: Call) -> Rows | None:
    found, (dim,) = call.rows("self"), call.dims()
    is_whole = call.out.shape[dim] == call.shape("self")[dim] if found and found.dim == dim else True
    return found if is_whole else None


def _cat(call: Call) -> Rows | None:
    """Tensors side by side; or one behind the other, each with all samples."""
    places = call.each_rows("tensors")
    return _same(places) if all(places) else None


def _mm(first: str, second: str) -> Callable[[Call], Rows | None]:
    """A product of two matrices, or of as many as the first dimension says. Nothing is summed over samples."""

    def rule(call: Call) -> Rows | None:
        one, other, last = call.rows(first), call.rows(second), call.out.ndim - 1
        if one and other:
            product = _same([one, other]) if one.dim == 0 and last == 2 else None
        elif one:
            product = one if one.dim == last - 1 else None
        else:
            product = other if other and other.dim == last else None
        if "self" in (first, second) or product is None or call.is_constant("self"):
            return product
        return _same([product, _aligned(call, "self")])

    return rule


def _layer_norm(call: Call) -> Rows | None:
    found = call.rows("input")
    kept = len(call.shape("input")) - len(call.given["normalized_shape"])
    return found if found and found.dim < kept and call.is_constant("weight", "bias") else None


def _of_channels(call: Call) -> Rows | None:
    """Operators for [samples, channels, …], whose other arguments are the same for all samples."""
    found = call.rows("input") or call.rows("self")
    if any(isinstance(call.given.get(name), fx.Node) for name in ("C", "HxW", "group")):
        return None  # a number that is made of the number of samples
    others = [name for name in call.given if name not in ("input", "self")]
    return found if found and found.dim == 0 and call.is_constant(*others) else None


def _pad(call: Call) -> Rows | None:
    found = call.rows("self")
    padded = len(call.given["pad"]) // 2
    return found if found and found.dim < call.out.ndim - padded else None


def _attention(call: Call) -> Rows | None:
    """softmax(q kᵀ) v of [samples, heads, places, width]."""
    if call.given.get("dropout_p") or not call.is_constant("attn_mask"):
        return None
    found = [call.rows(name) for name in ("query", "key", "value")]
    return _same(found) if all(each and each.dim == 0 for each in found) else None


def _gather(call: Call) -> Rows | None:
    """Numbers at places that a tensor says, along a dimension that is not that of samples."""
    sources = [name for name in ("self", "index", "src") if isinstance(call.given.get(name), fx.Node)]
    found = [call.rows(name) for name in sources]
    where = _same(found) if all(found) else None
    return where if where and where.dim not in call.dims() else None


def _index_select(call: Call) -> Rows | None:
    return _along("dim")(call) if call.is_constant("index") else None


def _embedding(call: Call) -> Rows | None:
    return call.rows("indices") if call.is_constant("weight") else None


def _index(call: Call) -> Rows | None:
    """x[:, i, j] with the same places for all samples; or rows of what is the same for all, at places of samples; or
    x[arange(B), i, j], which is at places of each sample."""
    indices = call.given["indices"]
    used = [dim for dim, each in enumerate(indices) if each is not None]
    found = call.rows("self")
    if call.is_numbered("indices"):
        others = call.each_rows("indices")[1:]
        is_flat = used == list(range(len(used))) and all(len(each.meta["val"].shape) == 1 for each in indices[1:])
        return found if found == Rows(0) and is_flat and all(each in (None, Rows(0)) for each in others) else None
    if found is None:
        return call.each_rows("indices")[0] if used == [0] else None
    if not call.is_constant("indices") or not used or used != list(range(used[0], used[-1] + 1)) or found.dim in used:
        return None
    moved = call.out.ndim - len(call.shape("self")) if found.dim > used[-1] else 0
    return Rows(found.dim + moved, found.block)


def _scattered(call: Call) -> Rows | None:
    """A part of a tensor is replaced, along a dimension that is not that of samples; or for all samples."""
    found, source, (dim,) = call.rows("self"), call.rows("src"), call.dims()
    if found is None or source is None:
        return None
    is_all = "end" in call.given and call.shape("src")[dim] == call.shape("self")[dim]
    dropped = len(call.shape("self")) - len(call.shape("src"))
    place = Rows(found.dim - dropped * (dim < found.dim), found.block)
    return found if source == place and (found.dim != dim or is_all) else None


def _diagonal(call: Call) -> Rows | None:
    found, dims = _along("dim1", "dim2")(call), call.dims("dim1") + call.dims("dim2")
    return found and Rows(found.dim - sum(dim < found.dim for dim in dims), found.block)


def _bucketize(call: Call) -> Rows | None:
    return call.rows("self") if call.is_constant("boundaries") else None


# What may be given sizes that are made of the number of samples: the shapes of what they answer are looked at.
_OF_SHAPES = (
    "view.default",
    "_unsafe_view.default",
    "expand.default",
    "repeat.default",
    "full.default",
    "native_group_norm.default",
)
# Beside these, operators that torch tags as pointwise.
_RULES: dict[str, Callable[[Call], Rows | None]] = {
    **dict.fromkeys(
        (
            "_to_copy.default",
            "alias.default",
            "copy.default",
            "fill.Scalar",
            "full_like.default",
            "lift_fresh_copy.default",
        ),
        _pointwise,
    ),
    **dict.fromkeys(("view.default", "_unsafe_view.default"), _view),
    "permute.default": _permute,
    "unsqueeze.default": _unsqueeze,
    **dict.fromkeys(("squeeze.dim", "squeeze.dims"), _squeeze),
    "expand.default": _expand,
    "repeat.default": _repeat,
    "full.default": _alike,
    "slice.Tensor": _slice,
    "cat.default": _cat,
    **dict.fromkeys(("split_with_sizes.default", "split.Tensor", "glu.default"), _along("dim")),
    **dict.fromkeys(("_softmax.default", "_log_softmax.default"), _along("dim")),
    **dict.fromkeys(("cumsum.default", "cumprod.default", "logcumsumexp.default"), _along("dim")),
    **dict.fromkeys(("sort.default", "sort.stable", "topk.default"), _along("dim")),
    "flip.default": _along("dims"),
    "roll.default": _along("dims"),
    **dict.fromkeys(("select.int", "unbind.int"), _over),
    **dict.fromkeys(("sum.dim_IntList", "mean.dim", "prod.dim_int", "logsumexp.default"), _over),
    **dict.fromkeys(
        ("amax.default", "amin.default", "max.dim", "min.dim", "argmax.default", "argmin.default"), _over
    ),
    **dict.fromkeys(("any.dim", "any.dims", "all.dim", "all.dims", "median.dim", "kthvalue.default"), _over),
    **dict.fromkeys(("var.correction", "std.correction", "var_mean.correction"), _over),
    "linalg_vector_norm.default": _over,
    "mm.default": _mm("self", "mat2"),
    "bmm.default": _mm("self", "mat2"),
    "addmm.default": _mm("mat1", "mat2"),
    "baddbmm.default": _mm("batch1", "batch2"),
    "native_layer_norm.default": _layer_norm,
    **dict.fromkeys(
        (
            "_native_batch_norm_legit_no_training.default",
            "native_group_norm.default",
            "convolution.default",
            "avg_pool2d.default",
            "max_pool2d_with_indices.default",
            "_adaptive_avg_pool2d.default",
        ),
        _of_channels,
    ),
    "constant_pad_nd.default": _pad,
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
    **dict.fromkeys(("gather.default", "scatter.src", "scatter.value", "scatter_add.default"), _gather),
    "index_select.default": _index_select,
    "index.Tensor": _index,
    "embedding.default": _embedding,
    **dict.fromkeys(("slice_scatter.default", "select_scatter.default"), _scattered),
    "diagonal.default": _diagonal,
    "bucketize.Tensor": _bucketize,
}


def rows_behind(op: torch._ops.OpOverload, call: Call, *, is_sized: bool) -> Rows | None:
    """Where the samples of an answer are; None: this use of the operator is not known to keep them apart.

    Args:
        op: the operator.
        call: its use.
        is_sized: whether it is given a number that is made of the number of samples.
    """
    name = str(op).removeprefix("aten.")
    if is_sized and name not in _OF_SHAPES:
        return None
    rule = _RULES.get(name) or (_pointwise if torch.Tag.pointwise in op.tags else None)
    return None if rule is None else rule(call)
