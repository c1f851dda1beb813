"""Whether a dense part keeps the samples of a batch apart: read off its operators, for any number of samples.

torch.export says which operators of core ATen a dense part is made of, and with which shapes, the number of samples
being a symbol. Each operator has to be on the lists below, of those that are known to keep samples apart where they
are used so. All others may let samples meet: requests are then scored one by one. Nothing is run.
"""

import io
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from export.errors import first_line
from export.quiet import quiet
from export.trained.lines import short_line_of


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the samples of a tensor are. The index j of dimension `dim` belongs to sample (j // block) % B."""

    dim: int
    block: int = 1


class _Call:
    """One use of an operator.

    Args:
        node: a step of a graph of ATen.
        rows: where the samples of earlier steps are. Steps that are the same for all samples are not in it.

    Attributes:
        given: its arguments by name.
        out: what it answers with: a tensor without numbers, or several.
    """

    def __init__(self, node: fx.Node, rows: Mapping[fx.Node, Rows]) -> None:
        schema = cast(torch._ops.OpOverload, node.target)._schema.arguments
        names, defaults = [each.name for each in schema], {each.name: each.default_value for each in schema}
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        self.out: Any = node.meta["val"]
        self._rows = rows

    def rows(self, name: str) -> Rows | None:
        """Where the samples of an argument are; None: it is the same for all samples."""
        (found,) = self.each_rows(name) or [None]
        return found

    def each_rows(self, name: str) -> list[Rows | None]:
        """Where the samples of each tensor of an argument are."""
        given = self.given.get(name)
        return [
            self._rows.get(each)
            for each in (given if isinstance(given, list | tuple) else [given])
            if isinstance(each, fx.Node)
        ]

    def is_constant(self, *names: str) -> bool:
        """Whether some arguments are the same for all samples."""
        return not any(any(self.each_rows(name)) for name in names)

    def shape(self, name: str) -> Sequence[Any]:
        """The shape of an argument."""
        found: Sequence[Any] = self.given[name].meta["val"].shape
        return found

    def dims(self, name: str = "dim", of: str = "self") -> list[int]:
        """An argument that names dimensions of another, counted from the first."""
        given = self.given.get(name)
        named = [given] if isinstance(given, int) else list(given or ())
        return [dim % max(1, len(self.shape(of))) for dim in named]


def what_mixes_samples(
    module: fx.GraphModule, inputs: Sequence[Tensor], served: torch.jit.ScriptModule | None = None
) -> str | None:
    """What may let the scores of a sample depend on other samples.

    Args:
        module: a dense part: tensors [B, …] in, tensors [B, …] out.
        inputs: an example of its inputs; more than `_COMPARED` samples.
        served: what TorchScript made of it, where its code may do otherwise there. None: it is torch's alone.

    Returns:
        An operator, and the line of the model that it is of; or why the operators are not known. None: each row of
        every answer depends on the same row of the inputs alone, whatever B is.
    """
    try:
        # torch prints graphs that it cannot finish.
        with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()), fx.traceback.preserve_node_meta():
            shapes = (tuple({0: torch.export.Dim("samples", min=2)} for _ in inputs),)
            found = torch.export.export(_Steps(module), tuple(inputs), dynamic_shapes=shapes, strict=False)
            program = found.run_decompositions()
    except Exception as error:  # the model's code, and torch's, may raise anything
        return f"a step that torch.export cannot follow: {first_line(error)}"
    if changed := program.graph_signature.buffers_to_mutate:
        return f"its buffer {min(changed.values())!r} changes"
    if served is not None:
        few = [each[:_COMPARED] for each in inputs]
        if more := _operators(served, few) - _operators(found.module(), few):
            return f"{min(more)[0]}, which TorchScript alone runs: its code is another one there"
    return _first_unknown(program.graph, program.graph_signature.user_inputs)


def what_is_one_step(module: fx.GraphModule) -> str | None:
    """A function or module that is one step of a graph, and neither torch's nor torchrec's; None: there is none.

    Or a layer with hooks. It may do something else for other numbers of samples, which torch.export does not see,
    and something else in TorchScript.
    """
    for node in module.graph.nodes:
        called: Any = node.target
        if node.op == "call_module":
            called = type(module.get_submodule(str(node.target)))
        home = (getattr(called, "__module__", None) or "torch").partition(".")[0]
        if node.op == "call_module" and (hooked := _hooked(module.get_submodule(str(node.target)))) is not None:
            return f"a hook, or forward of its own, of a {type(hooked).__name__},{short_line_of(node)}"
        if node.op in ("call_module", "call_function") and home not in _FOLLOWED:
            return f"{called.__qualname__}, which is not followed,{short_line_of(node)}"
    return None


def _hooked(layer: nn.Module) -> nn.Module | None:
    """A part of a layer whose call is more than the forward of its class; None: there is none."""
    for part in layer.modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return part
    return None


def what_branches(program: torch.jit.ScriptModule) -> str | None:
    """What in a program is done or not, or how often, as numbers say, or their count; None: nothing.

    torch.export sees one of the branches alone.
    """
    graph: Any = program.inlined_graph
    for kind in ("prim::If", "prim::Loop"):
        for node in graph.findAllNodes(kind, recurse=True):
            # A loop goes on as its last input says, and then as its block says.
            inputs = [*node.inputs()][: 1 if kind == "prim::If" else 2]
            again = [next(block.outputs()) for block in node.blocks() if kind == "prim::Loop"]
            if any(map(_follows_from_numbers, inputs + again)):
                return f"a branch or loop ({kind}) that its inputs decide"
    return None


def _follows_from_numbers(value: Any) -> bool:
    """Whether a value of TorchScript hangs on the numbers that a program is called with, or on their count."""
    node = value.node()
    is_length = node.kind() == "aten::len" and node.inputsAt(0).node().kind() in _OF_FIXED_LENGTH
    if is_length or node.kind() in _ALIKE:
        return False
    made_of = [*node.inputs(), *(output for block in node.blocks() for output in block.outputs())]
    return node.kind() not in _LOGIC or any(map(_follows_from_numbers, made_of))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are run on tensors of some samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[str, str]] = set()
        self._samples = samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [tuple(each.shape) if isinstance(each, Tensor) else each for each in args]
        has_samples = any(isinstance(each, tuple) and self._samples in each for each in given)
        if has_samples and func not in _WRITTEN_OTHERWISE:
            self.found.add((str(func), str(given)))
        return func(*args, **(kwargs or {}))


def _operators(module: nn.Module, inputs: Sequence[Tensor]) -> set[tuple[str, str]]:
    """The operators that a module runs on inputs, with the shapes of their tensors, and their other arguments."""
    seen = _Operators(len(inputs[0]))
    with torch.no_grad(), seen:
        module(*(each.clone() for each in inputs))
    return seen.found


class _Steps(nn.Module):
    """A graph, run step by step, so that what torch.export makes of a step has the line of the model's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return fx.Interpreter(self.module).run(*inputs)


def _first_unknown(graph: fx.Graph, inputs: Iterable[object]) -> str | None:
    rows = {node: Rows(0) for node in graph.nodes if node.name in inputs}
    samples = next(iter(rows)).meta["val"].shape[0].node.expr
    for node in graph.nodes:
        if node.op != "call_function" or _is_number(node) or node.target in _WITHOUT_ANSWER:
            continue
        if not any(each in rows or _is_number(each) for each in node.all_input_nodes) and _is_known(node):
            continue  # it is the same for all samples
        found = _rows_of(node, rows)
        value = node.meta["val"]
        if found is None or (isinstance(value, Tensor) and not _fits(found, value.shape, samples)):
            return f"{node.target}{short_line_of(node)}"
        rows[node] = found
    (output,) = (node for node in graph.nodes if node.op == "output")
    for each in output.all_input_nodes:
        if rows.get(each) != Rows(0) or _per_sample(each.meta["val"].shape[0], samples) != 1:
            return f"an answer whose rows are not samples{short_line_of(each)}"
    return None


def _rows_of(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """Where the samples of a step are; None: it may let them meet."""
    if node.target is operator.getitem:
        return rows[node.all_input_nodes[0]]
    if not _is_known(node):
        return None
    op = cast(torch._ops.OpOverload, node.target)
    name = str(op).removeprefix("aten.")
    if any(map(_is_number, node.all_input_nodes)) and name not in _OF_SHAPES:
        return None  # a number that is made of the number of samples
    rule = _RULES.get(name) or (_pointwise if torch.Tag.pointwise in op.tags else None)
    return None if rule is None else rule(_Call(node, rows))


def _is_known(node: fx.Node) -> bool:
    """Whether a step is an operator of ATen that answers with what follows from its arguments, and changes none."""
    op = node.target
    return op is operator.getitem or (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def _is_number(node: fx.Node) -> bool:
    """Whether a step answers with a number, which is then made of the number of samples."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _per_sample(size: Any, samples: Any) -> int | None:
    """k where a size is k·B; None where it is another."""
    if not isinstance(size, torch.SymInt):
        return None
    ratio = size.node.expr / samples
    return int(ratio) if ratio.is_Integer else None


def _fits(rows: Rows, shape: Sequence[Any], samples: Any) -> bool:
    """Whether a tensor may have its samples there: the size of no other dimension depends on their number."""
    if not (0 <= rows.dim < len(shape) and rows.block):
        return False
    count = _per_sample(shape[rows.dim], samples)
    others = [size for dim, size in enumerate(shape) if dim != rows.dim]
    return bool(count) and not (count or 0) % rows.block and all(isinstance(size, int) for size in others)


# The rules: where the samples of an answer are. None: this use of the operator is not known to keep them apart.


def _pointwise(call: _Call) -> Rows | None:
    """Each number of the answer is made of the numbers at its place, where shapes are broadcast."""
    broadcast: Any = torch.broadcast_shapes
    tensors = {name: each for name, each in call.given.items() if isinstance(each, fx.Node)}
    if not isinstance(call.out, Tensor):
        return None
    if list(call.out.shape) != [*broadcast(*(call.shape(name) for name in tensors))]:
        return None
    return _same(_aligned(call, name) for name in tensors)


def _aligned(call: _Call, name: str) -> Rows | None:
    """Where the samples of an argument come to be in an answer that it is broadcast to."""
    found = call.rows(name)
    return found and Rows(found.dim + call.out.ndim - len(call.shape(name)), found.block)


def _same(found: Iterable[Rows | None]) -> Rows | None:
    """Where the samples of several are, if it is the same place."""
    places = {each for each in found if each is not None}
    return places.pop() if len(places) == 1 else None


def _along(*names: str) -> Callable[[_Call], Rows | None]:
    """A rule for operators that work along named dimensions and keep them. The samples must be along another."""

    def rule(call: _Call) -> Rows | None:
        found, dims = call.rows("self"), [dim for name in names for dim in call.dims(name)]
        others = [name for name in call.given if name != "self"]
        return found if found and dims and found.dim not in dims and call.is_constant(*others) else None

    return rule


def _over(call: _Call) -> Rows | None:
    """Operators that make one number of those along some dimensions, which then are gone unless they are kept."""
    found, dims = _along("dim")(call), call.dims()
    if found is None or call.given.get("keepdim"):
        return found
    return Rows(found.dim - sum(dim < found.dim for dim in dims), found.block)


def _squeeze(call: _Call) -> Rows | None:
    found, shape = _along("dim")(call), call.shape("self")
    gone = [dim for dim in call.dims() if isinstance(shape[dim], int) and shape[dim] == 1]
    return found and Rows(found.dim - sum(dim < found.dim for dim in gone), found.block)


def _unsqueeze(call: _Call) -> Rows | None:
    found = call.rows("self")
    return found and Rows(found.dim + (call.given["dim"] % call.out.ndim <= found.dim), found.block)


def _permute(call: _Call) -> Rows | None:
    found = call.rows("self")
    return found and Rows(call.dims("dims").index(found.dim), found.block)


def _view(call: _Call) -> Rows | None:
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


def _expand(call: _Call) -> Rows | None:
    if call.rows("self"):
        return _aligned(call, "self")
    return _alike(call)


def _repeat(call: _Call) -> Rows | None:
    if (found := _aligned(call, "self")) is None:
        return _alike(call)
    is_fixed = all(isinstance(each, int) for each in call.given["repeats"])
    return found if is_fixed else None


def _alike(call: _Call) -> Rows | None:
    """What is made for any number of samples, alike for each of them."""
    along = [dim for dim, size in enumerate(call.out.shape) if isinstance(size, torch.SymInt)]
    if len(along) != 1 or isinstance(call.given.get("fill_value"), fx.Node):
        return None
    (dim,) = along
    (symbol,) = call.out.shape[dim].node.expr.free_symbols
    return Rows(dim, _per_sample(call.out.shape[dim], symbol) or 0)


def _slice(call: _Call) -> Rows | None:
    found, (dim,) = call.rows("self"), call.dims()
    is_whole = call.out.shape[dim] == call.shape("self")[dim] if found and found.dim == dim else True
    return found if is_whole else None


def _cat(call: _Call) -> Rows | None:
    """Tensors side by side; or one behind the other, each with all samples."""
    places = call.each_rows("tensors")
    return _same(places) if all(places) else None


def _mm(first: str, second: str) -> Callable[[_Call], Rows | None]:
    """A product of two matrices, or of as many as the first dimension says. Nothing is summed over samples."""

    def rule(call: _Call) -> Rows | None:
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


def _layer_norm(call: _Call) -> Rows | None:
    found = call.rows("input")
    kept = len(call.shape("input")) - len(call.given["normalized_shape"])
    return found if found and found.dim < kept and call.is_constant("weight", "bias") else None


def _of_channels(call: _Call) -> Rows | None:
    """Operators for [samples, channels, …], whose other arguments are the same for all samples."""
    found = call.rows("input") or call.rows("self")
    if any(isinstance(call.given.get(name), fx.Node) for name in ("C", "HxW", "group")):
        return None  # a number that is made of the number of samples
    others = [name for name in call.given if name not in ("input", "self")]
    return found if found and found.dim == 0 and call.is_constant(*others) else None


def _pad(call: _Call) -> Rows | None:
    found = call.rows("self")
    padded = len(call.given["pad"]) // 2
    return found if found and found.dim < call.out.ndim - padded else None


def _attention(call: _Call) -> Rows | None:
    """softmax(q kᵀ) v of [samples, heads, places, width]."""
    if call.given.get("dropout_p") or not call.is_constant("attn_mask"):
        return None
    found = [call.rows(name) for name in ("query", "key", "value")]
    return _same(found) if all(each and each.dim == 0 for each in found) else None


def _gather(call: _Call) -> Rows | None:
    """Numbers at places that a tensor says, along a dimension that is not that of samples."""
    sources = [name for name in ("self", "index", "src") if isinstance(call.given.get(name), fx.Node)]
    found = [call.rows(name) for name in sources]
    where = _same(found) if all(found) else None
    return where if where and where.dim not in call.dims() else None


def _index_select(call: _Call) -> Rows | None:
    return _along("dim")(call) if call.is_constant("index") else None


def _embedding(call: _Call) -> Rows | None:
    return call.rows("indices") if call.is_constant("weight") else None


def _index(call: _Call) -> Rows | None:
    """x[:, i, j] with the same places for all samples; or rows of what is the same for all, at places of samples."""
    indices = call.given["indices"]
    used = [dim for dim, each in enumerate(indices) if each is not None]
    found = call.rows("self")
    if found is None:
        return call.each_rows("indices")[0] if used == [0] else None
    if not call.is_constant("indices") or not used or used != list(range(used[0], used[-1] + 1)) or found.dim in used:
        return None
    moved = call.out.ndim - len(call.shape("self")) if found.dim > used[-1] else 0
    return Rows(found.dim + moved, found.block)


def _scattered(call: _Call) -> Rows | None:
    """A part of a tensor is replaced, along a dimension that is not that of samples; or for all samples."""
    found, source, (dim,) = call.rows("self"), call.rows("src"), call.dims()
    if found is None or source is None:
        return None
    is_all = "end" in call.given and call.shape("src")[dim] == call.shape("self")[dim]
    dropped = len(call.shape("self")) - len(call.shape("src"))
    place = Rows(found.dim - dropped * (dim < found.dim), found.block)
    return found if source == place and (found.dim != dim or is_all) else None


def _diagonal(call: _Call) -> Rows | None:
    found, dims = _along("dim1", "dim2")(call), call.dims("dim1") + call.dims("dim2")
    return found and Rows(found.dim - sum(dim < found.dim for dim in dims), found.block)


def _bucketize(call: _Call) -> Rows | None:
    return call.rows("self") if call.is_constant("boundaries") else None


# What torch.fx, and then torch.export, take for what it is.
_FOLLOWED = ("torch", "torchrec", "fbgemm_gpu", "_operator", "builtins", "math")
# What TorchScript knows of an argument before it knows the numbers in it, and how many there are.
_ALIKE = ("aten::dim", "prim::dtype", "prim::device", "prim::Constant", "prim::CreateObject", "aten::is_grad_enabled")
_LOGIC = ("aten::__is__", "aten::__isnot__", "aten::__not__", "aten::eq", "aten::ne", "prim::GetAttr", "prim::If")
_OF_FIXED_LENGTH = (
    "aten::size",
    "aten::items",
    "aten::keys",
    "aten::values",
    "prim::ListConstruct",
    "prim::DictConstruct",
)
# So many samples that no layer is as wide.
_COMPARED = 61
# What TorchScript and torch.export write in their own ways.
_WRITTEN_OTHERWISE = (torch.ops.aten._to_copy.default, torch.ops.aten.slice.Tensor)
_WITHOUT_ANSWER = (torch.ops.aten._assert_tensor_metadata.default,)
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
_RULES: dict[str, Callable[[_Call], Rows | None]] = {
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
