"""Steps of a graph of ATen: what they do to numbers, which tensors they write to, and parts of a graph."""

import operator
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn


def rows_read_by(argument: fx.Node) -> int | None:
    """The rows of the embedding that all integers of an input read; of several the fewest. None: there is none."""
    found = []
    for user in argument.users:
        if str(user.target) == "aten.embedding.default" and user.args[1] is argument:
            found.append(int(user.args[0].meta["val"].shape[0]))  # type: ignore[union-attr]
        elif str(user.target) in _WHOLE and (rows := rows_read_by(user)) is not None:
            found.append(rows)
    return min(found, default=None)


# Steps that hand on all numbers.
_WHOLE = (
    "aten.to.dtype",
    "aten.to.device",
    "aten.view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.default",
    "aten.flatten.using_ints",
    "aten.contiguous.default",
    "aten.long.default",
)


def is_random(node: fx.Node) -> bool:
    """Whether a step draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and draws(node.target, node.args, node.kwargs)


def draws(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers. Dropout does not, in eval mode."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given: dict[str, Any] = {each.name: each.default_value for each in op._schema.arguments}
    given |= {**dict(zip(given, args, strict=False)), **kwargs}
    # Dropout in eval mode, and attention without dropout, draw none.
    is_training = given.get("train", given.get("training", True))
    rate = given.get("p") if "dropout" in str(op) else given.get("dropout_p")
    return bool(is_training) and rate != 0.0


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """A graph without blocks that only say whether gradients are recorded, or that nothing is cast."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        block, given = _block_of(node)
        if block is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        inner = inlined(getattr(module, str(block.target))).graph
        arguments = (each for each in inner.nodes if each.op == "placeholder")
        within = {each: copies[own] for each, own in zip(arguments, given, strict=True)}
        copies[node] = graph.graph_copy(inner, within)
    for node in [each for each in graph.nodes if each.op == "call_function" and each.target is operator.getitem]:
        if not isinstance(node.args[0], fx.Node):  # an answer of a block
            node.replace_all_uses_with(node.args[0][node.args[1]])
            graph.erase_node(node)
    for node in graph.nodes:
        if (part := _joined_before(node) or _lengths_of_offsets(node)) is not None:
            node.replace_all_uses_with(part)
    return fx.GraphModule(module, graph)


def _joined_before(node: fx.Node) -> fx.Node | None:
    """What a step takes out of a join: of the lengths of all keys, those of one. None: it is no such step.

    Else the lengths of a key that nothing looks up would seem to be needed.
    """
    if str(node.target) != "aten.select.int" or node.args[1] != 0 or not isinstance(node.args[2], int):
        return None
    view = node.args[0]
    joined = view.args[0] if isinstance(view, fx.Node) and str(view.target) == "aten.view.default" else None
    if not isinstance(joined, fx.Node) or len(joined.args) > (1 if str(joined.target) == _JOINS else 2):
        return None
    parts: Any = joined.args[0]
    if str(joined.target) == "aten.repeat.default" and isinstance(parts, fx.Node):
        parts = [parts] * node.args[2] + [parts]
    elif str(joined.target) != _JOINS:
        return None
    row = str(node.meta["val"].shape)
    return parts[node.args[2]] if all(str(each.meta["val"].shape) == row for each in parts) else None


def _lengths_of_offsets(node: fx.Node) -> fx.Node | None:
    """The lengths that a step makes of the offsets of these lengths, by differences. None: it is no such step."""
    offsets: Any = None
    if str(node.target) == "aten.diff.default" and len(node.args) == 1:
        offsets = node.args[0]
    elif str(node.target) == "aten.sub.Tensor" and not node.kwargs:
        ends, starts = (_slice_of(each) for each in node.args)
        if ends is not None and starts is not None and ends[0] is starts[0]:
            offsets = ends[0] if ends[1] == (1, _TO_THE_END) and starts[1] == (0, -1) else None
    if not isinstance(offsets, fx.Node) or str(origin_of(offsets).target) != _OFFSETS:
        return None
    lengths = origin_of(offsets).args[0]
    return lengths if isinstance(lengths, fx.Node) and lengths.meta["val"].dim() == 1 else None


def _slice_of(node: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """What a step takes a slice of, along its first dimension: and from where to where. None: it is no such step."""
    if not isinstance(node, fx.Node) or str(node.target) != "aten.slice.Tensor" or node.args[1:2] not in ((), (0,)):
        return None
    if len(node.args) > 4:
        return None
    first, last = (*node.args[2:], None, None)[:2]
    return node.args[0], (first or 0, _TO_THE_END if last is None else last)


_TO_THE_END = sys.maxsize
_OFFSETS = "fbgemm.asynchronous_complete_cumsum.default"


def _block_of(node: fx.Node) -> tuple[Any, Sequence[Any]]:
    """The block that a step runs, and its arguments. None: it is no such step."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[1], node.args[2:]
    if node.target is torch.ops.higher_order.wrap_with_autocast and not node.args[2]:
        return node.args[4], node.args[5:]
    return None, ()


def attribute_of(module: nn.Module, path: str) -> Any:
    """What a module, or a part of it, has at a path."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


_HANDED_ON = ("aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.detach_.default")


def origin_of(node: fx.Node) -> fx.Node:
    """What a step only hands on."""
    while str(node.target) in _HANDED_ON:
        node = node.all_input_nodes[0]
    return node


# Steps that change no number: checks of torch.export, which are true of any request, and one of gradients.
_WITHOUT_EFFECT = (
    "aten.detach_.default",
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range_for_size.default",
    "aten.sym_constrain_range.default",
)
# It puts the ids of keys together, which eager TorchRec has together from the start.
_JOINS = "aten.cat.default"


def is_writing(node: fx.Node) -> bool:
    """Whether a step changes a tensor in place."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and str(op) not in _WITHOUT_EFFECT and op._schema.is_mutable


def is_copy(node: fx.Node) -> bool:
    """Whether a step makes a copy that is asked for."""
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return str(node.target) == "aten._to_copy.default" or bool(given.get("copy"))


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The steps whose tensors a writing step changes: those that it is given, and what they are views of."""
    waiting = _shared(node, of_writes=True)
    seen: set[fx.Node] = set()
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        yield found
        if found.target is operator.getitem or str(found.target) == _JOINS:
            waiting += found.all_input_nodes
        elif isinstance(found.target, torch._ops.OpOverload):
            waiting += _shared(found, of_writes=False)


def _shared(node: fx.Node, *, of_writes: bool) -> list[fx.Node]:
    """The arguments of an operator that it writes to; or whose memory its answer may share."""
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)  # noqa: S101  as `is_writing` says
    found: list[fx.Node] = []
    for number, argument in enumerate(op._schema.arguments):
        given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        about = argument.alias_info
        if about is not None and (about.is_write or not of_writes):
            found += [
                each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, fx.Node)
            ]
    return found


# Operators that put numbers elsewhere, and change none.
_MOVING = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.unflatten.int", "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.numpy_T.default",
    "aten.unsqueeze.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.clone.default",
    "aten.contiguous.default", "aten.alias.default", "aten.detach.default", "aten.detach_.default",
    "aten.cat.default", "aten.stack.default", "aten.concat.default", "aten.hstack.default", "aten.vstack.default",
    "aten.select.int",
    "aten.slice.Tensor", "aten.narrow.default", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.split.sizes", "aten.chunk.default", "aten.unbind.int", "aten.expand.default", "aten.flip.default",
    "aten.movedim.int", "aten.swapaxes.default", "aten.ravel.default", "aten.lift_fresh_copy.default",
    "aten.view_as.default", "aten.reshape_as.default", "aten.expand_as.default", "aten.repeat.default",
    "aten.tile.default",
)  # fmt: skip
# (order of keys, lengths, ids, weights, their sum): `KeyedJaggedTensor.permute`.
_PERMUTING = "fbgemm.permute_2D_sparse_data.default"
# Those that may also make other numbers of them: not where the other dtype has them all.
_CASTS = ("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default", "aten.long.default")
# What is made in the likeness of a tensor has none of its numbers.
_ALIKE = (
    "_like.default", "new_ones.default", "new_full.default", "new_zeros.default", "sym_size.int", "sym_numel.default",
)  # fmt: skip
# What lengths and weights that a forward makes may be made by, beside _MOVING, _CASTS and _ALIKE: then each differs
# from the next by a number that stays. So those of a few samples show those of all.
_MAKING = (
    "aten.full.default", "aten.ones.default", "aten.zeros.default", "aten.scalar_tensor.default",
    "aten.repeat.default", "aten.arange.default", "aten.arange.start", "aten.arange.start_step",
    "aten.cumsum.default", "aten.diff.default", "aten.sub.Tensor", "aten.add.Tensor", "aten.mul.Tensor",
    "aten.mul.Scalar", "fbgemm.asynchronous_complete_cumsum.default",
)  # fmt: skip
# By these, TorchRec cuts the ids of a KJT by key: where a cut is, is a sum of lengths. What is the right sum for some
# random lengths is it for all.
_SUMMING = (
    "aten.sum.dim_IntList", "aten.sum.default", "aten.cumsum.default", "aten.add.Tensor", "aten.item.default",
    "aten.scalar_tensor.default", "fbgemm.asynchronous_complete_cumsum.default", str(operator.add),
)  # fmt: skip


def has_none_of_the_numbers(node: fx.Node) -> bool:
    """Whether a step is made of the sizes of tensors, and of none of their numbers."""
    return str(node.target).endswith(_ALIKE)


def not_moved(
    module: fx.GraphModule, answers: Sequence[fx.Node], lengths: Collection[fx.Node] = (), *, is_raw: bool = False
) -> fx.Node | None:
    """The first step on the way to some answers that may change numbers of inputs; None: there is none.

    Args:
        module: the graph.
        answers: ids, lengths or weights.
        lengths: its inputs that say where ids may be cut.
        is_raw: whether any int64 is an id.
    """
    seen: set[fx.Node] = set()
    waiting = [*answers]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if str(node.target) == _PERMUTING:
            waiting += [each for each in node.args[1:4] if isinstance(each, fx.Node)]
        elif not str(node.target).endswith(_ALIKE):
            waiting += node.all_input_nodes
        if _has_inputs(node) and not _moves(node, is_raw) and not _sums(node, lengths):
            return node
    return next(
        (node for node in module.graph.nodes if is_writing(node) and not seen.isdisjoint(written(node))), None
    )


def not_made_alike(answers: Sequence[fx.Node]) -> fx.Node | None:
    """The first step on the way to some answers that may make other numbers for some samples; None: there is none."""
    seen: set[fx.Node] = set()
    waiting = [*answers]
    while waiting:
        node = waiting.pop()
        if node in seen or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        seen.add(node)
        waiting += node.all_input_nodes
        name = str(node.target)
        is_number = name == "aten.mul.Tensor" and any(isinstance(each, int | float) for each in node.args)
        if (
            node.op == "call_function"
            and not _has_inputs(node)
            and not name.endswith(_ALIKE)
            and node.target is not operator.getitem
            and (name not in (*_MOVING, *_CASTS, *_MAKING) or (name == "aten.mul.Tensor" and not is_number))
        ):
            return node
    return None


def _moves(node: fx.Node, is_raw: bool) -> bool:
    """Whether a step puts ids elsewhere, and changes none. Of raw ids, int32 has not all."""
    name, value = str(node.target), node.meta.get("val")
    if node.op == "placeholder" or node.target is operator.getitem or name in _MOVING:
        return True
    if name == _PERMUTING:
        order = node.args[0]
        return isinstance(order, fx.Node) and not _has_inputs(order)
    old = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if name not in _CASTS or not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return False
    if old.dtype.is_floating_point:
        return old.dtype.itemsize <= value.dtype.itemsize and value.dtype in (torch.float32, torch.float64)
    is_narrowed = value.dtype.itemsize < old.dtype.itemsize
    return value.dtype in (torch.int32, torch.int64) and not (is_raw and is_narrowed)


def _sums(node: fx.Node, lengths: Collection[fx.Node]) -> bool:
    """Whether a step makes sums of lengths, and of nothing else."""
    waiting, seen = [node], {node}
    while waiting:
        found = waiting.pop()
        if found.op == "placeholder" and found not in lengths:
            return False
        # Where something is put has to be the same for all lengths: else some would not show what others do.
        is_put = _moves(found, is_raw=False) and not any(
            _has_inputs(each) for each in found.all_input_nodes if isinstance(each.meta.get("val"), torch.SymInt)
        )
        if _has_inputs(found) and str(found.target) not in _SUMMING and not is_put:
            return False
        waiting += [each for each in found.all_input_nodes if each not in seen]
        seen |= {*found.all_input_nodes}
    return True


def _has_inputs(node: fx.Node, known: dict[fx.Node, bool] | None = None) -> bool:
    """Whether a step has numbers of the inputs: what is made of their sizes alone has none."""
    known = {} if known is None else known
    if node not in known:
        known[node] = node.op == "placeholder" or (
            node.op == "call_function"
            and not str(node.target).endswith(_ALIKE)
            and any(_has_inputs(each, known) for each in node.all_input_nodes)
        )
    return known[node]


def answers_of(graph: fx.Graph) -> list[fx.Node]:
    """The answers of a graph of torch.export, in order."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return _flat(output.args[0])


def _flat(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        # The graph of torch.export ends in a call that puts its answers into a tuple.
        return (
            _flat(value.args[0]) if value.op == "call_function" and "tree_unflatten" in str(value.target) else [value]
        )
    return [each for part in value or () for each in _flat(part)] if isinstance(value, list | tuple) else []
