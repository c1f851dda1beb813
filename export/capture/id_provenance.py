"""Find the source of the ids in a KJT that a forward makes itself: they must be ids of the example, in any order.

The graph shows the operators that make the KJT. Operators that only move numbers are allowed; others, and writes to
these tensors, are refused. Then this part of the graph is run on marks: numbers that all differ and are larger than
any size. The marks show the source of each id, whatever the ids are. Lengths and weights are located in the same way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from export.capture.call_signature import IdColumns, Signature
from export.capture.graph_inputs import ids_of, lengths_of, numbers_of, weights_of
from export.capture.graph_nodes import answers_of
from export.capture.number_moves import find_changing_node, find_uneven_node
from export.capture.row_counts import Input, is_lengths
from export.capture.stub_collections import Collections, keys_of_features
from export.capture.trace import ForwardKjt, TracedModel
from export.errors import ModelError, last_line
from export.trained.source_location import line_of
from serving.bundle.scores import JaggedInput, JaggedKind

# The batch sizes for which the part of the graph that moves ids is run.
_BATCH_SIZES = (2, 3, 5, 7)
# Larger than any number that a forward computes from sizes.
_FIRST_MARK = 1_000_003
# The ids, lengths and weights of a key.
_KeyTensors = tuple[Tensor, Tensor, Tensor | None]


def locate_ids(
    model: nn.Module,
    signature: Signature,
    traced: TracedModel,
    inputs: Mapping[Input, Tensor],
    collections: Collections,
) -> Signature:
    """The signature, with the tensor columns that are the ids of each key of a KJT that the forward makes.

    Args:
        model: the traced model, for messages.
        signature: of the model.
        traced: its graph.
        inputs: an example of the inputs of the graph.
        collections: of the model.

    Raises:
        ModelError: naming the line that changes ids, or joins ids of several samples.
    """
    sources: dict[str, IdColumns] = dict(signature.id_columns)
    key_of_feature = keys_of_features(collections)
    nodes = (node for node in traced.module.graph.nodes if node.op == "placeholder")
    lengths_nodes = [node for node, name in zip(nodes, traced.inputs, strict=True) if is_lengths(name)]
    for kjt, parts in _made_kjts(traced):
        _expect_moved(model, traced.module, kjt, parts, lengths_nodes)
        moving = _moving_part(traced.module, parts)
        for samples in _BATCH_SIZES:
            marked = _marked(inputs, samples, key_of_feature, signature)
            for key, tensors in zip(kjt.keys, _run(model, moving, kjt, marked), strict=True):
                source = _source_of(key, tensors, marked, signature)
                if source is None or sources.setdefault(key, source) != source:
                    raise ModelError(
                        f"{type(model).__name__}: gives a collection ids of key {key!r} that are not those of one "
                        "sample of the example for each of its samples, or have other lengths or weights"
                        f"{kjt.line}: pass the model a KeyedJaggedTensor, or a tensor [B, n]"
                    )
    columns = [(source.path, column) for source in sources.values() for column in source.columns]
    if len({*columns}) < len(columns):
        raise ModelError(
            f"{type(model).__name__}: several keys have the ids of one tensor{traced.made_kjts[-1].line}: expected "
            "a tensor for each key"
        )
    return replace(signature, id_columns={key: source for key, source in sources.items() if source.path})


def _made_kjts(traced: TracedModel) -> Iterator[tuple[ForwardKjt, list[fx.Node]]]:
    """Each KJT that the forward makes, with its values, its lengths, and the weights that its collection uses."""
    answers = iter(answers_of(traced.module.graph)[len(traced.outputs) :])
    for kjt in traced.made_kjts:
        yield kjt, [next(answers) for _ in range(3 if kjt.is_weighted else 2)]


def _expect_moved(
    model: nn.Module,
    module: fx.GraphModule,
    kjt: ForwardKjt,
    parts: Sequence[fx.Node],
    lengths_nodes: Sequence[fx.Node],
) -> None:
    """Refuse a KJT whose ids, lengths or weights an operator may change.

    Args:
        model: for messages.
        module: the graph.
        kjt: the KJT that the forward makes.
        parts: its values, lengths and weights.
        lengths_nodes: the inputs of the graph that are lengths.
    """
    ids, lengths, *weights = parts
    keys = ", ".join(map(repr, kjt.keys))
    changing = (
        find_changing_node(module, [ids], lengths_nodes, is_raw=kjt.is_raw)
        or find_changing_node(module, [lengths])
        or find_changing_node(module, weights, lengths_nodes)
    )
    if changing is not None:
        raise ModelError(
            f"{type(model).__name__}: makes the ids of the keys {keys} by {changing.target}"
            f"{line_of(changing) or kjt.line}: expected the ids of a request, in any order but unchanged: compute "
            "the new ids before the model, and pass them as an argument"
        )
    if (changing := find_uneven_node([lengths, *weights])) is not None:
        raise ModelError(
            f"{type(model).__name__}: makes the lengths of the keys {keys} by {changing.target}"
            f"{line_of(changing) or kjt.line}: expected the lengths of a request, or one number of ids for all "
            "samples: use torch.full((size,), number)"
        )


def with_shared_lengths(
    signature: Signature, traced: TracedModel, inputs: Mapping[Input, Tensor], collections: Collections
) -> Signature:
    """The signature, with the keys to which the forward gives lengths of another key. Arguments as `locate_ids`."""
    first = dict(signature.first)
    key_of_feature = keys_of_features(collections)
    for kjt, (_, lengths_node, *_weights) in _made_kjts(traced):
        if find_changing_node(traced.module, [lengths_node]) is not None:
            continue  # `locate_ids` refuses it, with its line
        moving = _moving_part(traced.module, [lengths_node])
        matches = [
            _keys_with_lengths(kjt, moving, _marked(inputs, samples, key_of_feature, signature))
            for samples in _BATCH_SIZES
        ]
        for key in kjt.keys:
            same = set.intersection(*(match[key] for match in matches))
            if lengths_of(key) in inputs and same and key not in same:
                first.setdefault(key, min(first.get(other, other) for other in same))
    return replace(signature, first=first)


def _keys_with_lengths(kjt: ForwardKjt, moving: nn.Module, marked: Mapping[Input, Tensor]) -> dict[str, set[str]]:
    """For each key of a KJT, the keys of the request whose lengths the forward gives it."""
    (lengths,) = moving(*marked.values())
    lengths_by_key = dict(zip(kjt.keys, lengths.long().reshape(len(kjt.keys), -1), strict=True))
    of_request = {
        name.name: marks.long()
        for name, marks in marked.items()
        if isinstance(name, JaggedInput) and is_lengths(name)
    }
    return {
        key: {name for name, marks in of_request.items() if torch.equal(marks, lengths_of_key)}
        for key, lengths_of_key in lengths_by_key.items()
    }


def _run(model: nn.Module, moving: nn.Module, kjt: ForwardKjt, marked: Mapping[Input, Tensor]) -> list[_KeyTensors]:
    """The ids, lengths and weights of each key of a KJT that is made of marked inputs."""
    try:
        ids, lengths, *weights = moving(*marked.values())
        lengths_by_key = lengths.reshape(len(kjt.keys), -1)
        sizes = lengths_by_key.sum(1).tolist()
        ids_by_key = ids.split(sizes)
        weights_by_key = weights[0].split(sizes) if weights else [None] * len(sizes)
    except Exception as error:  # the operators expect another number of ids
        raise ModelError(
            f"{type(model).__name__}: makes the ids of the keys {', '.join(map(repr, kjt.keys))}{kjt.line} in a "
            f"way that fails for other numbers of samples or ids: {last_line(error)}"
        ) from error
    return list(zip(ids_by_key, lengths_by_key, weights_by_key, strict=True))


def _moving_part(module: fx.GraphModule, answers: Sequence[fx.Node]) -> nn.Module:
    """The part of a graph that computes some answers."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = {*answers}
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed |= {*node.all_input_nodes}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[answer] for answer in answers))
    return fx.GraphModule(module, graph)


def _marked(
    inputs: Mapping[Input, Tensor], samples: int, key_of_feature: Mapping[str, str], signature: Signature
) -> dict[Input, Tensor]:
    """Inputs whose ids and weights are marks, all different, and whose keys have different lengths.

    Args:
        inputs: an example of each input.
        samples: B.
        key_of_feature: the key of each feature.
        signature: has the keys of fixed length.
    """
    generator = torch.Generator().manual_seed(samples)
    lengths = {
        name.name: torch.full((samples,), signature.fixed[name.name])
        if name.name in signature.fixed
        else torch.randperm(samples + 5, generator=generator)[:samples] + 1
        for name in inputs
        if isinstance(name, JaggedInput) and is_lengths(name)
    }
    lengths |= {key: lengths[first] for key, first in signature.first.items()}
    marked: dict[Input, Tensor] = {}
    next_mark = _FIRST_MARK
    for name, example in inputs.items():
        size = samples
        if isinstance(name, JaggedInput):
            key = signature.key_of(name, key_of_feature)
            size = int(lengths[key].sum()) if key in lengths else signature.fixed[key] * samples
            if name.kind is JaggedKind.LENGTHS:
                marked[name] = lengths[key].to(example.dtype)
                continue
        shape = torch.Size((size, *example.shape[1:]))
        is_integer = not example.is_floating_point() and example.dtype is not torch.bool
        if not is_integer and not (isinstance(name, JaggedInput) and name.kind is JaggedKind.WEIGHTS):
            marked[name] = torch.zeros(shape, dtype=example.dtype)
            continue
        marks = torch.randperm(shape.numel(), generator=generator) + next_mark
        next_mark += shape.numel()
        if is_integer and next_mark > torch.iinfo(example.dtype).max:
            marks %= torch.iinfo(example.dtype).max  # some marks become equal, but not for every batch size
        marked[name] = marks.to(example.dtype).view(shape)
    return marked


def _source_of(
    key: str, tensors: _KeyTensors, marked: Mapping[Input, Tensor], signature: Signature
) -> IdColumns | None:
    """The columns with the ids of a key, without a path if the request has the key itself; None if not found."""
    ids, lengths, weights = tensors
    name = numbers_of(key) if key in signature.numbers else ids_of(key)
    if name in marked:
        is_same = torch.equal(ids, marked[name].to(ids.dtype))
        is_same &= torch.equal(lengths.long(), marked[lengths_of(signature.numbers.get(key, key))].long())
        if weights is not None:
            is_same &= weights_of(key) in marked and torch.equal(weights.float(), marked[weights_of(key)].float())
        return IdColumns("", ()) if is_same else None
    count = signature.fixed[key]
    if weights is not None or not count or len(ids) % count:
        return None
    if not (lengths.view(len(ids) // count, -1).sum(1) == count).all():
        return None
    for path, marks in marked.items():
        if not isinstance(path, str) or marks.is_floating_point() or marks.dtype is torch.bool:
            continue
        rows = marks.reshape(len(marks), -1)
        if len(ids) != len(rows) * count:
            continue
        columns = [_column_of(rows, column) for column in ids.view(len(rows), count).unbind(1)]
        indices = tuple(column for column in columns if column is not None)
        if len(indices) == len(columns):
            return IdColumns(path, indices)
    return None


def _column_of(rows: Tensor, numbers: Tensor) -> int | None:
    """The column of a matrix that equals some numbers, or None."""
    columns = (rows == numbers[:, None]).all(0).nonzero().flatten().tolist()
    return int(columns[0]) if columns else None
