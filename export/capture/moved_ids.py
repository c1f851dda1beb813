"""Whether the ids that a forward gives to a collection are those of the example, in another order and nothing else.

A forward may make a KJT itself, of tensors of the example. The graph says which operators do it: those that move
numbers pass, all others are refused. The moving part of the graph is then run on numbers that are all different: they
say where each id comes from, whatever the ids are.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from export.capture.graph import Captured, Input, ids_of, lengths_of
from export.capture.signature import Places, Signature
from export.errors import ModelError
from export.trained.keyed import line_of
from serving.bundle.scores import JaggedInput

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
# Those that may also make other numbers of them: of one dtype of integers another, which has them all.
_CASTS = ("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default", "aten.long.default")
# What is made in the likeness of a tensor has none of its numbers.
_ALIKE = (
    "_like.default",
    "new_ones.default",
    "new_full.default",
    "new_zeros.default",
    "sym_size.int",
    "sym_numel.default",
)
# Batch sizes that the moving part is run for.
_SAMPLES = (2, 3, 7)


def placed(model: nn.Module, signature: Signature, found: Captured, inputs: Mapping[Input, Tensor]) -> Signature:
    """The signature, with where the ids of keys are that the forward makes KJTs of itself.

    Args:
        model: that was followed, for messages.
        signature: as it was followed by.
        found: the graph.
        inputs: an example of its inputs.

    Raises:
        ModelError: naming the line that changes ids, or puts those of several samples together.
    """
    answers = answers_of(found.module.graph)[len(found.outputs) :]
    places: dict[str, Places] = dict(signature.placed)
    for keys, values, lengths in zip(found.made, answers[::2], answers[1::2], strict=True):
        for node in (values, lengths):
            if (wrong := _not_moved(node)) is not None:
                raise ModelError(
                    f"{type(model).__name__}: makes the ids of the keys {', '.join(map(repr, keys))} by "
                    f"{wrong.target}{line_of(wrong)}: expected ids as a request brings them, in another order alone: "
                    "do it before the model, and give what comes of it as its argument"
                )
        moving = _moving_part(found.module, values, lengths)
        for samples in _SAMPLES:
            given = _marked(inputs, samples)
            ids, sizes = moving(*given.values())
            for key, own in zip(keys, _bags(keys, ids, sizes), strict=True):
                place = _place_of(key, own, given, signature)
                if place is None or places.setdefault(key, place) != place:
                    raise ModelError(
                        f"{type(model).__name__}: gives a collection ids of key {key!r} that are not those of one "
                        f"sample of the example for each of its samples{line_of(values)}: give it a "
                        "KeyedJaggedTensor, or a tensor [B, n]"
                    )
    by_place = [(each.path, number) for each in places.values() for number in each.places]
    if len({*by_place}) < len(by_place):
        raise ModelError(
            f"{type(model).__name__}: several keys have the ids of one tensor: expected one key for each"
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


def _not_moved(answer: fx.Node) -> fx.Node | None:
    """The first step on the way to an answer that may change numbers of inputs; None: there is none."""
    seen: set[fx.Node] = set()
    waiting = [answer]
    while waiting:
        node = waiting.pop()
        if node in seen or not _has_inputs(node):
            continue
        seen.add(node)
        if node.op == "placeholder" or node.target is operator.getitem:
            waiting += node.all_input_nodes
            continue
        name = str(node.target)
        value = node.meta.get("val")
        is_cast = name in _CASTS and isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)
        if name not in _MOVING and not is_cast:
            return node
        waiting += [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor | list | tuple)]
    return None


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


def _moving_part(module: fx.GraphModule, *answers: fx.Node) -> nn.Module:
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


def _marked(inputs: Mapping[Input, Tensor], samples: int) -> dict[Input, Tensor]:
    """Inputs of which each id is another number."""
    found: dict[Input, Tensor] = {}
    first = 1
    for each, old in inputs.items():
        size = samples
        if isinstance(each, JaggedInput):
            size = samples + 3 if each != lengths_of(each.name) else samples
        shape = (size, *old.shape[1:])
        if old.is_floating_point() or old.dtype is torch.bool:
            found[each] = torch.zeros(shape, dtype=old.dtype)
        elif isinstance(each, JaggedInput) and each == lengths_of(each.name):
            lengths = torch.ones(samples, dtype=old.dtype)
            lengths[0], lengths[-1] = 2, 3
            found[each] = lengths
        else:
            count = int(torch.Size(shape).numel())
            found[each] = torch.arange(first, first + count).to(old.dtype).view(shape)
            first += count
    return found


def _bags(keys: Sequence[str], ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The ids and lengths of each key of a KJT."""
    by_key = lengths.reshape(len(keys), -1)
    pieces: Any = ids.split(by_key.sum(1).tolist())  # type: ignore[no-untyped-call]
    return list(zip(pieces, by_key, strict=True))


def _place_of(
    key: str, own: tuple[Tensor, Tensor], given: Mapping[Input, Tensor], signature: Signature
) -> Places | None:
    """Where the ids of a key are: in a tensor with a row for each sample; or, without a path, those of that key."""
    ids, lengths = own
    if ids_of(key) in given:
        is_same = torch.equal(ids.long(), given[ids_of(key)].long()) and torch.equal(
            lengths.long(), given[lengths_of(key)].long()
        )
        return Places("", ()) if is_same else None
    count = signature.fixed[key]
    if not count or len(ids) % count or not (lengths.view(len(ids) // count, -1).sum(1) == count).all():
        return None
    for each, marks in given.items():
        if isinstance(each, str) and not marks.is_floating_point() and marks.dtype is not torch.bool:
            rows, low = marks.reshape(len(marks), -1), int(marks.min())
            found = ids.long().view(len(marks), count) - low
            width = rows.shape[1]
            places = found - torch.arange(len(marks))[:, None] * width
            if bool(((places >= 0) & (places < width)).all()) and bool((places == places[0]).all()):
                return Places(each, tuple(cast(list[int], places[0].tolist())))
    return None
