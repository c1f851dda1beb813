"""Whether the ids that a forward gives to a collection are those of the example, in another order and nothing else.

A forward may make a KJT itself, of tensors of the example. The graph says which operators do it: those that move
numbers pass, all others are refused, and so is what is written to on the way. The moving part of the graph is then
run on numbers that are all different, and larger than sizes are: they say where each id comes from, whatever the ids
are. Lengths and weights likewise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, fx, nn

from export.capture.call_signature import Places, Signature
from export.capture.graph_inputs import ids_of, lengths_of, numbers_of, weights_of
from export.capture.graph_nodes import answers_of, not_made_alike, not_moved
from export.capture.row_counts import Input, is_lengths
from export.capture.stub_collections import Collections, keys_of_features
from export.capture.trace import ForwardKjt, TracedModel
from export.errors import ModelError, last_line
from export.trained.source_location import line_of
from serving.bundle.scores import JaggedInput, JaggedKind

# Batch sizes that the moving part is run for.
_SAMPLES = (2, 3, 5, 7)
# No number that a forward makes of sizes is as large.
_FIRST_MARK = 1_000_003


def locate_ids(
    model: nn.Module,
    signature: Signature,
    found: TracedModel,
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
    nodes = (node for node in found.module.graph.nodes if node.op == "placeholder")
    lengths = [node for node, each in zip(nodes, found.inputs, strict=True) if is_lengths(each)]
    for made in found.made_kjts:
        parts = [next(answers) for _ in range(3 if made.is_weighted else 2)]
        ids, of_lengths, *weights = parts
        wrong = (
            not_moved(found.module, [ids], lengths, is_raw=made.is_raw)
            or not_moved(found.module, [of_lengths])
            or not_moved(found.module, weights, lengths)
        )
        if wrong is not None:
            raise ModelError(
                f"{type(model).__name__}: makes the ids of the keys {', '.join(map(repr, made.keys))} by "
                f"{wrong.target}{line_of(wrong) or made.line}: expected ids as a request brings them, in another "
                "order alone: do it before the model, and give what comes of it as its argument"
            )
        if (wrong := not_made_alike([of_lengths, *weights])) is not None:
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
            f"{type(model).__name__}: several keys have the ids of one tensor{found.made_kjts[-1].line}: expected "
            "one key for each"
        )
    return replace(signature, placed={key: each for key, each in places.items() if each.path})


def with_shared_lengths(
    signature: Signature, found: TracedModel, inputs: Mapping[Input, Tensor], collections: Collections
) -> Signature:
    """The signature, with the keys that the forward gives the lengths of another one. Arguments as `locate_ids`."""
    answers, first = iter(answers_of(found.module.graph)[len(found.outputs) :]), dict(signature.first)
    keys_of = keys_of_features(collections)
    for made in found.made_kjts:
        _, of_lengths, *_ = [next(answers) for _ in range(3 if made.is_weighted else 2)]
        if not_moved(found.module, [of_lengths]) is not None:
            continue  # it is refused later, by its line
        moving, likes = _moving_part(found.module, [of_lengths]), list[dict[str, set[str]]]()
        for samples in _SAMPLES:
            given = _marked(inputs, samples, keys_of, signature)
            (lengths,) = moving(*given.values())
            by_key = dict(zip(made.keys, lengths.long().reshape(len(made.keys), -1), strict=True))
            own = {
                each.name: marks.long()
                for each, marks in given.items()
                if isinstance(each, JaggedInput) and is_lengths(each)
            }
            likes.append({key: {n for n, each in own.items() if torch.equal(each, of)} for key, of in by_key.items()})
        for key in made.keys:
            others = set.intersection(*(each[key] for each in likes))
            if lengths_of(key) in inputs and others and key not in others:
                first.setdefault(key, min(first.get(each, each) for each in others))
    return replace(signature, first=first)


def _run(
    model: nn.Module, moving: nn.Module, made: ForwardKjt, given: Mapping[Input, Tensor]
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
        if isinstance(each, JaggedInput) and is_lengths(each)
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
