"""Whether the ids that a forward gives to a collection are those of the example, in another order and nothing else.

A forward may make a KJT itself, of tensors of the example. The graph says which operators do it: those that move
numbers pass, all others are refused, and so is what is written to on the way. The moving part of the graph is then
run on numbers that are all different, and larger than sizes are: they say where each id comes from, whatever the ids
are. Lengths and weights likewise.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from export.capture.call_signature import Places, Signature
from export.capture.given import ids_of, lengths_of, numbers_of, weights_of
from export.capture.graph import Captured, Made
from export.capture.sizes import Input
from export.capture.stand_ins import Collections, keys_of_features
from export.capture.steps import is_writing, written
from export.errors import ModelError, last_line
from export.trained.keyed import line_of
from serving.bundle.scores import JaggedInput, JaggedKind

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
    "aten.view_as.default", "aten.reshape_as.default", "aten.expand_as.default",
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
# Batch sizes that the moving part is run for.
_SAMPLES = (2, 3, 7)
# No number that a forward makes of sizes is as large.
_FIRST_MARK = 1_000_003


def placed(
    model: nn.Module,
    signature: Signature,
    found: Captured,
    inputs: Mapping[Input, Tensor],
    collections: Collections,
) -> Signature:
    """The signature, with where the ids of keys are that the forward makes KJTs of itself.

    Args:
        model: that was followed, for messages.
        signature: as it was followed by.
        found: the graph.
        inputs: an example of its inputs.
        collections: of the model.

    Raises:
        ModelError: naming the line that changes ids, or puts those of several samples together.
    """
    answers = iter(answers_of(found.module.graph)[len(found.outputs) :])
    places: dict[str, Places] = dict(signature.placed)
    keys_of = keys_of_features(collections)
    for made in found.made:
        parts = [next(answers) for _ in range(3 if made.is_weighted else 2)]
        ids, *others = parts
        wrong = _not_moved(found.module, [ids], made.is_raw) or _not_moved(found.module, others, is_raw=False)
        if wrong is not None:
            raise ModelError(
                f"{type(model).__name__}: makes the ids of the keys {', '.join(map(repr, made.keys))} by "
                f"{wrong.target}{line_of(wrong) or made.line}: expected ids as a request brings them, in another "
                "order alone: do it before the model, and give what comes of it as its argument"
            )
        if (wrong := _not_made_alike(others)) is not None:
            raise ModelError(
                f"{type(model).__name__}: makes the lengths of the keys {', '.join(map(repr, made.keys))} by "
                f"{wrong.target}{line_of(wrong) or made.line}: expected lengths that a request brings, or as many "
                "ids in each sample: take torch.full((size,), number)"
            )
        moving = _moving_part(found.module, parts)
        for samples in _SAMPLES:
            given = _marked(inputs, samples, keys_of, signature)
            for key, own in zip(made.keys, _run(model, moving, made, given), strict=True):
                place = _place_of(key, own, given, signature)
                if place is None or places.setdefault(key, place) != place:
                    raise ModelError(
                        f"{type(model).__name__}: gives a collection ids of key {key!r} that are not those of one "
                        "sample of the example for each of its samples, or have other lengths or weights"
                        f"{made.line}: give it a KeyedJaggedTensor, or a tensor [B, n]"
                    )
    by_place = [(each.path, number) for each in places.values() for number in each.places]
    if len({*by_place}) < len(by_place):
        raise ModelError(
            f"{type(model).__name__}: several keys have the ids of one tensor{found.made[-1].line}: expected one key "
            "for each"
        )
    return replace(signature, placed={key: each for key, each in places.items() if each.path})


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


def _run(
    model: nn.Module, moving: nn.Module, made: Made, given: Mapping[Input, Tensor]
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The ids, lengths and weights of each key of a KJT that is made of marked inputs."""
    try:
        ids, lengths, *weights = moving(*given.values())
        by_key = lengths.reshape(len(made.keys), -1)
        sizes = by_key.sum(1).tolist()
        of_ids = ids.split(sizes)
        of_weights = weights[0].split(sizes) if weights else [None] * len(sizes)
    except Exception as error:  # of numbers that are not as many as it expects
        raise ModelError(
            f"{type(model).__name__}: makes the ids of the keys {', '.join(map(repr, made.keys))}{made.line} in a "
            f"way that cannot be done for any number of samples and ids: {last_line(error)}"
        ) from error
    return list(zip(of_ids, by_key, of_weights, strict=True))


def _not_moved(module: fx.GraphModule, answers: Sequence[fx.Node], is_raw: bool) -> fx.Node | None:
    """The first step on the way to some answers that may change numbers of inputs; None: there is none."""
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
        if _has_inputs(node) and not _moves(node, is_raw):
            return node
    return next(
        (node for node in module.graph.nodes if is_writing(node) and not seen.isdisjoint(written(node))), None
    )


def _not_made_alike(answers: Sequence[fx.Node]) -> fx.Node | None:
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


def _moving_part(module: fx.GraphModule, answers: Sequence[fx.Node]) -> nn.Module:
    """What makes some answers of a graph, and nothing else."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = {*answers}
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed |= {*node.all_input_nodes}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[each] for each in answers))
    return fx.GraphModule(module, graph)


def _marked(
    inputs: Mapping[Input, Tensor], samples: int, keys_of: Mapping[str, str], signature: Signature
) -> dict[Input, Tensor]:
    """Inputs of which each id and weight is another number, and each length of a key.

    Args:
        inputs: an example of each.
        samples: how many.
        keys_of: the key of each feature.
        signature: has the keys of fixed length.
    """
    generator = torch.Generator().manual_seed(samples)
    lengths = {
        each.name: torch.full((samples,), signature.fixed[each.name])
        if each.name in signature.fixed
        else torch.randperm(samples + 5, generator=generator)[:samples] + 1
        for each in inputs
        if isinstance(each, JaggedInput) and each.kind is JaggedKind.LENGTHS
    }
    lengths |= {key: lengths[first] for key, first in signature.first.items()}
    found: dict[Input, Tensor] = {}
    first = _FIRST_MARK
    for each, old in inputs.items():
        size = samples
        if isinstance(each, JaggedInput):
            key = signature.key_of(each, keys_of)
            size = int(lengths[key].sum()) if key in lengths else signature.fixed[key] * samples
            if each.kind is JaggedKind.LENGTHS:
                found[each] = lengths[key].to(old.dtype)
                continue
        shape = torch.Size((size, *old.shape[1:]))
        is_marked = not old.is_floating_point() and old.dtype is not torch.bool
        if is_marked or (isinstance(each, JaggedInput) and each.kind is JaggedKind.WEIGHTS):
            marks = torch.randperm(shape.numel(), generator=generator) + first
            first += shape.numel()
            if is_marked and first > torch.iinfo(old.dtype).max:  # some are alike: other batch sizes tell them apart
                marks %= torch.iinfo(old.dtype).max
            found[each] = marks.to(old.dtype).view(shape)
        else:
            found[each] = torch.zeros(shape, dtype=old.dtype)
    return found


def _place_of(
    key: str,
    own: tuple[Tensor, Tensor, Tensor | None],
    given: Mapping[Input, Tensor],
    signature: Signature,
) -> Places | None:
    """Where the ids of a key are: in a tensor with a row for each sample; or, without a path, those of that key."""
    ids, lengths, weights = own
    brought = numbers_of(key) if key in signature.numbers else ids_of(key)
    if brought in given:
        is_same = torch.equal(ids, given[brought].to(ids.dtype))
        is_same &= torch.equal(lengths.long(), given[lengths_of(signature.numbers.get(key, key))].long())
        if weights is not None:
            is_same &= weights_of(key) in given and torch.equal(weights.float(), given[weights_of(key)].float())
        return Places("", ()) if is_same else None
    count = signature.fixed[key]
    if weights is not None or not count or len(ids) % count:
        return None
    if not (lengths.view(len(ids) // count, -1).sum(1) == count).all():
        return None
    for each, marks in given.items():
        if isinstance(each, str) and not marks.is_floating_point() and marks.dtype is not torch.bool:
            rows = marks.reshape(len(marks), -1)
            if len(ids) != len(rows) * count:
                continue
            places = [_column_of(rows, column) for column in ids.view(len(rows), count).unbind(1)]
            if None not in places:
                return Places(each, tuple(cast(list[int], places)))
    return None


def _column_of(rows: Tensor, numbers: Tensor) -> int | None:
    """The column of a matrix that has some numbers."""
    found = (rows == numbers[:, None]).all(0).nonzero().flatten().tolist()
    return int(found[0]) if found else None
