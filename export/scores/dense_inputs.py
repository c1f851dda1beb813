"""What a dense part takes: the widths of its inputs, its weights and their dtype."""

import copy
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import quantize_dynamic
from torch.fx.node import map_aggregate

from export.batchability.probes import as_served
from export.capture.trace import EMBEDDINGS
from export.errors import CheckpointError, ModelError, QuantizeError
from export.scores.split_at_collections import DenseSubgraph, as_taken
from export.trained.checkpoint import Checkpoint
from export.trained.model_weights import take_place
from export.trained.running import copied, dotted
from export.trained.source_location import line_of
from serving.bundle.scores import SCORE_DTYPES, DenseDtype, DenseInput
from serving.errors import ConfigurationError


def inputs_of(cut: DenseSubgraph, told: Mapping[str, int]) -> tuple[DenseInput, ...]:
    """The dense inputs, with their widths.

    Args:
        cut: what takes them.
        told: widths by name. Those of other inputs are of the nn.Linear that they go into.

    Raises:
        ConfigurationError: a width is not known; or one is told that is not the nn.Linear's, or for something else.
    """
    if unknown := told.keys() - {*cut.inputs}:
        expected = ", ".join(map(repr, cut.inputs)) or "none"
        raise ConfigurationError(f"dense_widths (--dense-width) {min(unknown)!r}: expected one of {expected}")
    arguments = {str(node.target): node for node in cut.module.graph.nodes if node.op == "placeholder"}
    return tuple(DenseInput(name, (_width(cut.module, arguments[name], told.get(name)),)) for name in cut.inputs)


def _width(module: fx.GraphModule, argument: fx.Node, told: int | None) -> int:
    widths = {layer.in_features for layer in _layers(module, argument)}
    if told is not None:
        if not widths <= {told}:
            where, expected = line_of(next(iter(argument.users))), min(widths - {told})
            raise ConfigurationError(
                f"dense_widths (--dense-width) {argument.target!r}: expected {expected}, of the nn.Linear that takes "
                f"it{where}, got {told}"
            )
        return told
    if len(widths) == 1:
        return widths.pop()
    where = "".join(line_of(user) for user in list(argument.users)[:1])
    raise ConfigurationError(
        f"dense input {argument.target!r}: its width cannot be read off an nn.Linear that takes it{where}: tell it: "
        f"--dense-width {argument.target}=N, dense_widths={{{str(argument.target)!r}: N}}{_joined(module, argument)}"
    )


def _joined(module: fx.GraphModule, argument: fx.Node) -> str:
    """What N is where torch.cat joins the input with others for an nn.Linear; "" where it does not."""
    for joined in argument.users:
        if joined.target in (torch.cat, torch.concat, torch.concatenate, torch.hstack):
            for layer in _layers(module, joined):
                return (
                    f": N is the {layer.in_features} of the nn.Linear behind torch.cat, less all else that it joins"
                )
    return ""


def _layers(module: fx.GraphModule, argument: fx.Node) -> Iterator[nn.Linear]:
    for user in argument.users:
        if user.op == "call_module" and isinstance(layer := module.get_submodule(str(user.target)), nn.Linear):
            yield layer


_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat)
_SPLITS = (torch.split, torch.functional.split, torch.ops.aten.split_with_sizes)
_NARROWS = (torch.narrow, torch.ops.aten.narrow)
# Steps that hand on all that they are given, which is float32.
_WHOLE = ((torch.ops.aten.slice, 0, 0, sys.maxsize), (torch.ops.aten.to, torch.float32))
# By the step that has them: columns of the embeddings, [first, last).
_Spans = dict[fx.Node, tuple[int, int]]


def merge_adjacent_columns(module: fx.GraphModule, width: int) -> fx.GraphModule:
    """A dense part that does not cut embeddings apart only to join neighbours again, as a loop over their keys does.

    What it joins may share memory with the embeddings, where `module` has a copy.

    Args:
        module: its weights are those of what is returned.
        width: columns of the embeddings.
    """
    module = fx.GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    nodes = list(module.graph.nodes)
    embeddings = as_taken(next(node for node in nodes if node.target == EMBEDDINGS))
    spans: _Spans = {embeddings: (0, width)}
    for node in nodes:
        if (span := _span_of(node, spans)) is not None:
            spans[node] = span
        elif node.target in _JOINS:
            _join_neighbours(node, embeddings, spans)
    for node in reversed(nodes):
        if (node in spans or node.target in _SPLITS) and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


def _span_of(node: fx.Node, spans: _Spans) -> tuple[int, int] | None:
    """The columns that a step takes out of others. None: it does something else, or it is not known which."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and getattr(source, "target", None) in _SPLITS:
        return _span_of_piece(source, node.args[1], spans)
    if not isinstance(source, fx.Node) or source not in spans:
        return None
    if (node.target, *node.args[1:]) in _WHOLE:
        return spans[source]
    if node.target not in _NARROWS or _argument(node, 1, "dim") not in (1, -1):
        return None
    start, length = _argument(node, 2, "start"), _argument(node, 3, "length")
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:  # it counts from the end
        return None
    first = spans[source][0] + start
    return first, first + length


def _span_of_piece(split: fx.Node, number: Any, spans: _Spans) -> tuple[int, int] | None:
    """The columns of a piece that a step cuts others into."""
    source: Any = split.args[0] if split.args else None
    sizes = _argument(split, 1, "split_size_or_sections")
    is_known = isinstance(sizes, list | tuple) and all(isinstance(each, int) for each in (number, *sizes))
    if not is_known or source not in spans or _argument(split, 2, "dim") not in (1, -1):
        return None
    ends = [*accumulate(sizes, initial=spans[source][0])]
    return [*pairwise(ends)][int(number)]


def _argument(node: fx.Node, number: int, name: str) -> Any:
    return node.args[number] if number < len(node.args) else node.kwargs.get(name)


def _join_neighbours(join: fx.Node, embeddings: fx.Node, spans: _Spans) -> None:
    """Have a step take columns that lie side by side as one piece."""
    given = _argument(join, 0, "tensors")
    if not isinstance(given, list | tuple) or _argument(join, 1, "dim") not in (1, -1):
        return
    pieces: list[list[fx.Node]] = []
    for piece in given:
        if pieces and piece in spans and spans.get(pieces[-1][-1], (0, -1))[1] == spans[piece][0]:
            pieces[-1].append(piece)
        else:
            pieces.append([piece])
    if len(pieces) == len(given):
        return
    with join.graph.inserting_before(join):
        made = [piece[0] if len(piece) == 1 else _as_one(piece, embeddings, spans) for piece in pieces]
        if len(made) > 1:
            joined = join.graph.call_function(cast(Any, join.target), (made, 1))
        else:  # what is joined has its rows side by side
            joined = join.graph.call_method("contiguous", (made[0],))
    join.replace_all_uses_with(joined)
    join.graph.erase_node(join)


def _as_one(neighbours: list[fx.Node], embeddings: fx.Node, spans: _Spans) -> fx.Node:
    first, last = spans[neighbours[0]][0], spans[neighbours[-1]][1]
    if (first, last) == spans[embeddings]:
        return embeddings
    return embeddings.graph.call_function(torch.narrow, (embeddings, 1, first, last - first))


def with_weights(
    found: DenseSubgraph, path: str, collections: Iterable[str], checkpoint: Checkpoint | None
) -> fx.GraphModule:
    """A copy of what was cut out, on the CPU, with the weights that serve.

    Args:
        found: what was cut out of a model, which has its weights but for those of its collections.
        path: of what was cut in the model.
        collections: paths of the collections in the model. A forward may read a table of one itself.
        checkpoint: has their weights; None: the model itself has them.

    Raises:
        CheckpointError: a weight is missing.
    """
    module = cast(fx.GraphModule, copied(found.module, ()).eval())
    inside = tuple(f"{dotted(each)}." for each in collections)
    for name, each in [*module.named_parameters(), *module.named_buffers()]:
        key = dotted(path, name)
        if checkpoint is not None and key.startswith(inside):
            take_place(module, each, checkpoint.tensor(key, each))
        elif each.is_meta:
            raise CheckpointError(
                f"a buffer of the dense part, {key!r}, is on the meta device, and its numbers are in no checkpoint: "
                "build the model with its tables alone on meta, as --checkpoint does"
            )
    return module.cpu()


def answer_as_served(module: fx.GraphModule, answers: Sequence[Tensor], names: Sequence[str]) -> None:
    """Have a dense part bring each answer to the dtype that it is served in, whatever that of its weights will be.

    Args:
        module: as it was cut out.
        answers: its answers to anything.
        names: of them.

    Raises:
        ModelError: no request could be answered with such numbers.
    """
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    served = []
    with module.graph.inserting_before(output):
        for node, answer, name in zip(output.args[0], answers, names, strict=True):
            if (dtype := as_served(answer).dtype) not in _SCORES:
                known = (str(each).removeprefix("torch.") for each in (*_SCORES, torch.float16, torch.bfloat16))
                raise ModelError(
                    f"output {name!r}: expected one of {', '.join(known)}, got {str(dtype).removeprefix('torch.')}: "
                    "convert it in the forward; of complex numbers, answer with both parts"
                )
            # Integers may be a view of what a request brings: they are copied. Floats may be narrower than they are.
            cast_or_copy = {torch.float32: "float", torch.float64: "double"}.get(dtype, "clone")
            served.append(module.graph.call_method(cast_or_copy, (node,)))
    output.args = (tuple(served),)
    module.recompile()


# Dtypes of scores.
_SCORES = tuple(torch.from_numpy(np.zeros(0, dtype)).dtype for dtype in SCORE_DTYPES)


def with_dtype(module: fx.GraphModule, dtype: DenseDtype) -> nn.Module:
    """A dense part with weights of `dtype`. Its inputs and outputs keep their dtypes.

    Args:
        module: as it was cut out. Its outputs end in a cast to their own dtype.
        dtype: BF16 does all in bfloat16; INT8 quantizes the weights of nn.Linear, and its inputs by the
            range that they have in a batch.
    """
    if dtype is DenseDtype.FP32:
        return module
    module = copy.deepcopy(module)
    if dtype is DenseDtype.INT8:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and not torch.isfinite(layer.weight).all():
                raise QuantizeError(
                    f"weights '{name}.weight': hold NaN or infinity, which INT8 does not have: find out how the "
                    "training made it, or keep them in FP32: --dense-dtype fp32"
                )
        with warnings.catch_warnings():
            # torch 2.13 still has it, and torchao, which is to follow, cannot be scripted.
            warnings.filterwarnings(
                "ignore", message="torch.ao.quantization is deprecated", category=DeprecationWarning
            )
            quantized: nn.Module = quantize_dynamic(module, {nn.Linear}, torch.qint8, inplace=True)  # type: ignore[no-untyped-call]
        return quantized
    nodes = list(module.graph.nodes)
    if any(isinstance(node.target, torch._ops.OpOverloadPacket) for node in nodes):
        for node in nodes:  # it says of each step in which dtype it is done
            node.args, node.kwargs = map_aggregate(node.args, _narrow), map_aggregate(node.kwargs, _narrow)
    else:
        _narrow_inputs(module)
    module.recompile()
    return module.bfloat16()


def _narrow(argument: Any) -> Any:
    return torch.bfloat16 if argument is torch.float32 else argument


def _narrow_inputs(module: fx.GraphModule) -> None:
    """Have all that a dense part takes brought to bfloat16."""
    for node in [each for each in module.graph.nodes if each.op == "placeholder"]:
        taken = as_taken(node)
        if taken is not node:  # the embeddings, which become float32
            taken.target, taken.args = "to", (node, torch.bfloat16)
            continue
        with module.graph.inserting_after(node):
            narrow = module.graph.call_method("to", (node, torch.bfloat16))
        node.replace_all_uses_with(narrow, partial(operator.is_not, narrow))
