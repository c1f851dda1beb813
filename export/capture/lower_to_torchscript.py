"""A graph of torch.export → one that TorchScript compiles: it takes the inputs that it uses."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from export.capture.call_signature import Signature
from export.capture.graph_inputs import ids_of, numbers_of
from export.capture.graph_nodes import answers_of, attribute_of, is_copy, is_random, is_writing, written
from export.capture.row_counts import Answer, Input, rows_of_answers, served_answers, shape_of
from export.capture.stub_collections import Collections, keys_of_features
from export.capture.trace import EMBEDDINGS, TracedModel
from export.errors import ModelError
from export.trained.source_location import line_of
from serving.bundle.scores import JaggedInput, JaggedKind

# Arguments that are the same for all that is on a CPU.
_OF_DEVICES = ("device", "layout", "pin_memory")
_NUMBERS: Mapping[Any, Any] = {
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_not: operator.not_,
}
_MADE = "_tensor_constant"
# Jagged inputs that a model may write to: they are its own.
_WRITABLE = (JaggedKind.ROWS, JaggedKind.NUMBERS)


def lower_to_torchscript(
    model: nn.Module, found: TracedModel, signature: Signature, collections: Collections
) -> tuple[fx.GraphModule, tuple[Input, ...], dict[str, Answer]]:
    """What TorchScript compiles of a model.

    Args:
        model: that was followed.
        found: the graph.
        signature: what its inputs are.
        collections: of the model.

    Returns:
        The graph. It takes the inputs that come next, `embeddings` first, and answers a tuple of tensors.
        The inputs that it uses.
        Its outputs by name: without those that are an input of the request, or have a row neither for each sample nor
            for each id of a key.

    Raises:
        ModelError: it changes ids or tables in place, uses ids that no collection looks up, or has no answer.
    """
    graph = found.module.graph
    answers = dict(zip(found.outputs, answers_of(graph), strict=False))
    inputs = dict(zip((node for node in graph.nodes if node.op == "placeholder"), found.inputs, strict=True))
    rows = rows_of_answers(inputs, answers)
    if not rows:
        samples = next(iter(inputs)).meta["val"].shape[0].node.expr
        got = ", ".join(f"{name!r} {shape_of(each, samples)}" for name, each in answers.items())
        raise ModelError(f"{type(model).__name__}: expected an answer with a row for each sample, got {got}")
    converter = _Converter(model, found, signature, collections, inputs)
    module, taken = converter.converted([(answers[name], dim) for name, (_, dim) in rows.items()])
    features = keys_of_features(collections)
    return module, taken, served_answers(rows, inputs, taken, lambda each: signature.key_of(each, features))


class _Converter:
    def __init__(
        self,
        model: nn.Module,
        found: TracedModel,
        signature: Signature,
        collections: Collections,
        inputs: Mapping[fx.Node, Input],
    ) -> None:
        self._model, self._module, self._signature, self._inputs = model, found.module, signature, inputs
        self._graph, self._counts = fx.Graph(), found.counts
        self._root: dict[str, Any] = {}
        self._copies: dict[Any, Any] = {}
        self._samples = next(iter(inputs)).meta["val"].shape[0].node.expr
        self._tables = {id(each) for collection in collections for each in collection.parameters()}
        self._states = {id(each): name for name, each in (*model.named_parameters(), *_kept_buffers(model))}

    def converted(self, outputs: Sequence[tuple[fx.Node, int]]) -> tuple[fx.GraphModule, tuple[Input, ...]]:
        """The graph, and the inputs that it takes. `outputs`: what it answers, and the dimension of its rows."""
        needed = self._needed([node for node, _ in outputs])
        self._expect_numbers(needed)
        taken = self._take(needed)
        for node in self._module.graph.nodes:
            if node in needed and node.op in ("get_attr", "call_function"):
                self._copies[node] = self._convert(node)
                self._keep_meta(node)
        own = [(self._copies[node], dim) for node, dim in outputs]
        self._graph.output(tuple(self._method("movedim", each, dim, 0) if dim else each for each, dim in own))
        for node in [each for each in self._graph.nodes if each.op == "get_attr" and not each.users]:
            self._graph.erase_node(node)  # it is of a layer
        named = {str(each.target) for each in self._graph.nodes if each.op in ("get_attr", "call_module")}
        self._root = {name: each for name, each in self._root.items() if name in named}
        self._graph.lint()
        return fx.GraphModule(self._root, self._graph, type(self._model).__name__), taken

    def _needed(self, outputs: Iterable[fx.Node]) -> set[fx.Node]:
        """The steps that answers are made of, and those that change a tensor in place."""
        needed = {*outputs}
        for node in reversed(self._module.graph.nodes):
            if is_writing(node):
                self._expect_no_lookup(node)
            if node in needed and is_random(node):
                raise ModelError(
                    f"{type(self._model).__name__}: its forward draws random numbers in eval mode, by "
                    f"{node.target}{line_of(node)}: no two of its answers are the same: have it draw none"
                )
            if node in needed or is_writing(node):
                needed |= {node, *(() if self._counts_samples(node) else node.all_input_nodes)}
        return needed

    def _counts_samples(self, node: fx.Node) -> bool:
        """Whether a step is the number of samples, which the embeddings have, too."""
        value = node.meta.get("val")
        return (
            str(node.target) == "aten.sym_size.int"
            and isinstance(value, torch.SymInt)
            and value.node.expr == self._samples
        )

    def _expect_no_lookup(self, node: fx.Node) -> None:
        """Refuse a step that changes ids, or a table, in place."""
        placed = {each.path for each in self._signature.id_columns.values()}
        for root in written(node):
            table = self._tensor(root)
            if id(table) in self._tables:
                raise ModelError(
                    f"{type(self._model).__name__}: its forward writes to {self._states.get(id(table))!r}"
                    f"{line_of(node)}, which lookups would not see: do it before the export"
                )
            found = self._inputs.get(root)
            if found in placed or (isinstance(found, JaggedInput) and found.kind not in _WRITABLE):
                raise ModelError(
                    f"{type(self._model).__name__}: its forward changes ids in place by {node.target}{line_of(node)}"
                    ": lookups would not see it: do it before the model"
                )

    def _expect_numbers(self, needed: set[fx.Node]) -> None:
        """Refuse to take how many numbers there are, where the numbers themselves are not brought."""
        brought = {self._inputs.get(node) for node in needed}
        for name in [n for n, each in self._counts.items() if each in needed and numbers_of(n) not in brought]:
            raise ModelError(
                f"{type(self._model).__name__}: uses how many numbers {name!r} has in each sample, and none of "
                "these: no request would say it: give it as a tensor [B]"
            )

    def _take(self, needed: set[fx.Node]) -> tuple[Input, ...]:
        """Make the inputs of the graph; those that it takes."""
        taken: list[Input] = []
        placed = {each.path for each in self._signature.id_columns.values()}
        asked: set[str] = set()
        for node, each in self._inputs.items():
            if node in needed and isinstance(each, str) and each in placed:
                self._expect_placed(node, each)
                asked |= {key for key, place in self._signature.id_columns.items() if place.path == each}
            elif node in needed or each == EMBEDDINGS:
                self._copies[node] = self._placeholder(each, node)
                taken.append(each)
        for key in sorted(asked):
            self._copies[ids_of(key)] = self._placeholder(ids_of(key), None)
            taken.append(ids_of(key))
        for node, each in self._inputs.items():
            if node in needed and isinstance(each, str) and each in placed:
                self._copies[node] = self._tensor_of(each, node)
        return tuple(taken)

    def _placeholder(self, each: Input, node: fx.Node | None) -> fx.Node:
        name = each if each == EMBEDDINGS else f"given_{len([n for n in self._graph.nodes if n.op == 'placeholder'])}"
        made = self._graph.placeholder(str(name), Tensor)
        if each == EMBEDDINGS:
            self._embeddings = made
        if node is None:  # ids are int64, as requests bring them
            return made
        return self._operator(torch.ops.aten.to, made, node.meta["val"].dtype)

    def _expect_placed(self, node: fx.Node, path: str) -> None:
        width = math.prod(node.meta["val"].shape[1:])
        there = {
            number for each in self._signature.id_columns.values() if each.path == path for number in each.columns
        }
        if there != set(range(width)):
            raise ModelError(
                f"{type(self._model).__name__}: uses numbers of {path!r} that no collection looks up"
                f"{line_of(next(iter(node.users)))}: give them as a tensor of their own"
            )

    def _tensor_of(self, path: str, node: fx.Node) -> fx.Node:
        """The tensor of the example at `path`, made of the ids of the keys that are taken from it."""
        taken = {key: each.columns for key, each in self._signature.id_columns.items() if each.path == path}
        columns = [self._method("view", self._copies[ids_of(key)], -1, len(each)) for key, each in taken.items()]
        every = columns[0] if len(columns) == 1 else self._operator(torch.ops.aten.cat, columns, 1)
        places = [place for each in taken.values() for place in each]
        if places != sorted(places):
            order = torch.tensor([places.index(place) for place in range(len(places))])
            every = self._operator(torch.ops.aten.index_select, every, 1, self._attribute(order))
        value = node.meta["val"]
        return self._method("view", self._operator(torch.ops.aten.to, every, value.dtype), -1, *value.shape[1:])

    def _attribute(self, tensor: Tensor) -> fx.Node:
        """A tensor of the model."""
        name = self._states.get(id(tensor))
        if name is None:
            name = next((n for n, each in self._root.items() if each is tensor), f"{_MADE}{len(self._root)}")
        self._root[name] = tensor
        return self._graph.get_attr(name)

    def _convert(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(attribute_of(self._module, str(node.target)))
        if self._counts_samples(node):
            return self._method("size", self._embeddings, 0)
        args = fx.map_arg(node.args, self._copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._copies.__getitem__)
        name = str(node.target)
        if name == "aten.linear.default" and (layer := self._layer(node)) is not None:
            return self._graph.call_module(layer, (args[0],))
        args, kwargs = self._constants(args), self._constants(kwargs)
        if (rule := _RULES.get(name)) is not None:
            return rule(self, node, args)
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return self._graph.call_function(_NUMBERS.get(target, target), args, kwargs)
        given = {key: each for key, each in kwargs.items() if key not in _OF_DEVICES}
        return self._graph.call_function(
            getattr(getattr(torch.ops, target.namespace), name.split(".")[1]), args, given
        )

    def _constants(self, value: Any) -> Any:
        """What TorchScript has no literal for."""
        if isinstance(value, float) and not math.isfinite(value):
            return self._graph.call_function(float, (str(value),))
        if isinstance(value, list | tuple):
            return type(value)(self._constants(each) for each in value)
        return {key: self._constants(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _layer(self, node: fx.Node) -> str | None:
        """The nn.Linear of the model that a step is, by its path; None: it is none."""
        weight, bias = (self._tensor(each) for each in (*node.args[1:], None, None)[:2])
        path, _, leaf = self._states.get(id(weight), "").rpartition(".")
        layer = self._model.get_submodule(path) if leaf == "weight" and path else None
        if layer is None or type(layer) is not nn.Linear or layer.bias is not bias:
            return None
        self._root[path] = layer
        return path

    def _tensor(self, node: Any) -> Tensor | None:
        """The tensor of the model that a step gets. None: it is no such step."""
        is_get = isinstance(node, fx.Node) and node.op == "get_attr"
        return attribute_of(self._module, str(node.target)) if is_get else None

    def _operator(self, target: Any, *args: Any) -> fx.Node:
        return self._graph.call_function(target, args)

    def _method(self, name: str, *args: Any) -> fx.Node:
        return self._graph.call_method(name, args)

    def _keep_meta(self, node: fx.Node) -> None:
        copied = self._copies[node]
        if isinstance(copied, fx.Node):
            copied.meta["stack_trace"] = node.meta.get("stack_trace")


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are in the model's state dict."""
    state = model.state_dict(keep_vars=True)
    yield from ((name, each) for name, each in model.named_buffers() if name in state)


def _size(to: _Converter, _: fx.Node, args: Any) -> Any:
    return to._method("size", *args)


def _squeeze(to: _Converter, node: fx.Node, args: Any) -> Any:
    """Without the dimensions that are 1 for any number of samples: that of the samples is never one of them."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    gone = [dim for dim, size in enumerate(shape) if isinstance(size, int) and size == 1]
    return to._operator(torch.ops.aten.squeeze, args[0], gone) if gone else args[0]


def _to_dtype(to: _Converter, node: fx.Node, args: Any) -> Any:
    made = to._operator(torch.ops.aten.to, args[0], node.meta["val"].dtype)
    # A copy that is asked for stays one: what is written to it later is not written to what it was made of.
    return to._method("clone", made) if is_copy(node) else made


def _bits(to: _Converter, node: fx.Node, args: Any) -> Any:
    """`x.view(dtype)`, which TorchScript has as a copy alone."""
    if any(node in written(each) for each in node.graph.nodes if is_writing(each)):
        raise ModelError(f"{type(to._model).__name__}: its forward writes to a view of another dtype{line_of(node)}")
    return to._operator(torch.ops.aten.view_copy, *args)


_RULES: Mapping[str, Callable[[_Converter, fx.Node, Any], Any]] = {
    "aten.sym_size.int": _size,
    "aten.sym_numel.default": lambda to, _, args: to._method("numel", *args),
    "aten.item.default": lambda to, node, args: to._operator(_number_of(node), args[0]),
    "aten._local_scalar_dense.default": lambda to, node, args: to._operator(_number_of(node), args[0]),
    "aten.squeeze.default": _squeeze,
    "aten.view.dtype": _bits,
    **dict.fromkeys(
        ("aten.to.device", "aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default", "aten.to.other"),
        _to_dtype,
    ),
    **dict.fromkeys(
        ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"),
        lambda _, __, args: args[0],
    ),
    "aten.lift_fresh_copy.default": lambda to, _, args: to._method("clone", args[0]),
}


def _number_of(node: fx.Node) -> Any:
    value = node.meta["val"]
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next((kind for given, kind in kinds.items() if isinstance(value, given)), type(value))
