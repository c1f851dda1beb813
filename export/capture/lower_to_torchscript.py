"""Turn a graph of torch.export into one that TorchScript compiles. It takes only the inputs that it uses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from export.capture.call_signature import Signature
from export.capture.graph_inputs import ids_of, numbers_of
from export.capture.graph_nodes import answers_of, attribute_of, is_random, is_writing, written_nodes
from export.capture.row_counts import Answer, Input, rows_of_answers, served_answers, shape_of
from export.capture.stub_collections import Collections, keys_of_features
from export.capture.torchscript_calls import TorchScriptCalls
from export.capture.trace import EMBEDDINGS, TracedModel
from export.errors import ModelError
from export.trained.source_location import line_of
from serving.bundle.scores import JaggedInput, JaggedKind

_CONSTANT = "_tensor_constant"
# Jagged inputs that a model may write to, because they are copies.
_WRITABLE = (JaggedKind.ROWS, JaggedKind.NUMBERS)


def lower_to_torchscript(
    model: nn.Module, traced: TracedModel, signature: Signature, collections: Collections
) -> tuple[fx.GraphModule, tuple[Input, ...], dict[str, Answer]]:
    """Turn the graph of a model into one that TorchScript compiles.

    Args:
        model: the traced model.
        traced: its graph.
        signature: of the model.
        collections: of the model.

    Returns:
        The graph, which takes the inputs below, `embeddings` first, and returns a tuple of tensors; the inputs that
        it uses; and its outputs by name, except for inputs of the request, and outputs with a row neither for each
        sample nor for each id of a key.

    Raises:
        ModelError: the model changes ids or tables in place, uses ids that no collection looks up, or has no answer.
    """
    graph = traced.module.graph
    answers = dict(zip(traced.outputs, answers_of(graph), strict=False))
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    inputs = dict(zip(placeholders, traced.inputs, strict=True))
    rows = rows_of_answers(inputs, answers)
    if not rows:
        samples = next(iter(inputs)).meta["val"].shape[0].node.expr
        shapes = ", ".join(f"{name!r} {shape_of(answer, samples)}" for name, answer in answers.items())
        raise ModelError(f"{type(model).__name__}: expected an answer with a row for each sample, got {shapes}")
    converter = _Converter(model, traced, signature, collections, inputs)
    module, used = converter.convert([(answers[name], dim) for name, (_, dim) in rows.items()])
    key_of_feature = keys_of_features(collections)
    return module, used, served_answers(rows, inputs, used, lambda name: signature.key_of(name, key_of_feature))


class _Converter:
    """Builds the graph for TorchScript, from the part of the traced graph that its outputs need."""

    def __init__(
        self,
        model: nn.Module,
        traced: TracedModel,
        signature: Signature,
        collections: Collections,
        inputs: Mapping[fx.Node, Input],
    ) -> None:
        self._model, self._module, self._signature, self._inputs = model, traced.module, signature, inputs
        self._graph, self._counts = fx.Graph(), traced.counts
        self._calls = TorchScriptCalls(self._graph, type(model).__name__)
        self._root: dict[str, Any] = {}
        self._copies: dict[Any, Any] = {}
        self._samples = next(iter(inputs)).meta["val"].shape[0].node.expr
        self._tables = {id(parameter) for collection in collections for parameter in collection.parameters()}
        persistent = model.state_dict(keep_vars=True)
        self._state_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._state_names |= {id(buffer): name for name, buffer in model.named_buffers() if name in persistent}
        self._paths_of_ids = {source.path for source in signature.id_columns.values()}

    def convert(self, outputs: Sequence[tuple[fx.Node, int]]) -> tuple[fx.GraphModule, tuple[Input, ...]]:
        """The graph, and the inputs that it takes. `outputs`: of the graph, with the dimension of their rows."""
        needed = self._needed([node for node, _ in outputs])
        self._expect_numbers(needed)
        used = self._add_inputs(needed)
        for node in self._module.graph.nodes:
            if node in needed and node.op in ("get_attr", "call_function"):
                self._copies[node] = copy = self._convert_node(node)
                if isinstance(copy, fx.Node):
                    copy.meta["stack_trace"] = node.meta.get("stack_trace")  # for messages with lines
        copies = [(self._copies[node], dim) for node, dim in outputs]
        self._graph.output(
            tuple(self._calls.method("movedim", copy, dim, 0) if dim else copy for copy, dim in copies)
        )
        for node in list(self._graph.nodes):
            if node.op == "get_attr" and not node.users:  # a weight of a layer, which is called as a module
                self._graph.erase_node(node)
        named = {str(node.target) for node in self._graph.nodes if node.op in ("get_attr", "call_module")}
        self._root = {name: value for name, value in self._root.items() if name in named}
        self._graph.lint()
        return fx.GraphModule(self._root, self._graph, type(self._model).__name__), used

    def _needed(self, outputs: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes from which outputs are computed, and those that change a tensor in place."""
        needed = {*outputs}
        for node in reversed(self._module.graph.nodes):
            if is_writing(node):
                self._expect_no_lookup(node)
            if node in needed and is_random(node):
                raise ModelError(
                    f"{type(self._model).__name__}: its forward draws random numbers in eval mode, by "
                    f"{node.target}{line_of(node)}, so its answers differ from call to call: draw none in eval mode"
                )
            if node in needed or is_writing(node):
                needed.add(node)
                if not self._is_batch_size(node):
                    needed.update(node.all_input_nodes)
        return needed

    def _is_batch_size(self, node: fx.Node) -> bool:
        """Whether a node is the number of samples, which is also a size of the embeddings."""
        value = node.meta.get("val")
        return (
            str(node.target) == "aten.sym_size.int"
            and isinstance(value, torch.SymInt)
            and value.node.expr == self._samples
        )

    def _expect_no_lookup(self, node: fx.Node) -> None:
        """Refuse a node that changes ids, or a table, in place."""
        for root in written_nodes(node):
            table = self._tensor(root)
            if id(table) in self._tables:
                raise ModelError(
                    f"{type(self._model).__name__}: its forward writes to {self._state_names.get(id(table))!r}"
                    f"{line_of(node)}, which lookups would not see: change the table before the export"
                )
            name = self._inputs.get(root)
            if name in self._paths_of_ids or (isinstance(name, JaggedInput) and name.kind not in _WRITABLE):
                raise ModelError(
                    f"{type(self._model).__name__}: its forward changes ids in place by {node.target}{line_of(node)}"
                    ", which lookups would not see: change them before the model"
                )

    def _expect_numbers(self, needed: set[fx.Node]) -> None:
        """Refuse a model that uses the lengths of numbers, but not the numbers: no request brings such lengths."""
        used = {self._inputs.get(node) for node in needed}
        for name, counted in self._counts.items():
            if counted in needed and numbers_of(name) not in used:
                raise ModelError(
                    f"{type(self._model).__name__}: uses how many numbers {name!r} has in each sample, and none of "
                    "these numbers, which no request would bring: pass the counts as a tensor [B]"
                )

    def _add_inputs(self, needed: set[fx.Node]) -> tuple[Input, ...]:
        """Add the inputs of the graph, and list them.

        A tensor of the example with ids of keys is replaced by inputs with these ids, from which it is computed.
        """
        used: list[Input] = []
        tensors_of_ids: dict[fx.Node, str] = {}
        for node, name in self._inputs.items():
            if node in needed and isinstance(name, str) and name in self._paths_of_ids:
                self._expect_only_ids(node, name)
                tensors_of_ids[node] = name
            elif node in needed or name == EMBEDDINGS:
                self._copies[node] = self._placeholder(name, node)
                used.append(name)
        paths = {*tensors_of_ids.values()}
        for key in sorted(key for key, source in self._signature.id_columns.items() if source.path in paths):
            self._copies[ids_of(key)] = self._placeholder(ids_of(key), None)
            used.append(ids_of(key))
        for node, path in tensors_of_ids.items():
            self._copies[node] = self._tensor_of_ids(path, node)
        return tuple(used)

    def _placeholder(self, name: Input, node: fx.Node | None) -> fx.Node:
        placeholders = [placeholder for placeholder in self._graph.nodes if placeholder.op == "placeholder"]
        # These names are part of the program. Only their order matters.
        placeholder = self._graph.placeholder(
            EMBEDDINGS if name == EMBEDDINGS else f"given_{len(placeholders)}", Tensor
        )
        if name == EMBEDDINGS:
            self._embeddings = placeholder
        if node is None:  # ids are int64, as requests bring them
            return placeholder
        return self._calls.operator(torch.ops.aten.to, placeholder, node.meta["val"].dtype)

    def _expect_only_ids(self, node: fx.Node, path: str) -> None:
        """Refuse a tensor of the example with columns that are not ids of keys."""
        width = math.prod(node.meta["val"].shape[1:])
        sources = [source for source in self._signature.id_columns.values() if source.path == path]
        if {column for source in sources for column in source.columns} != set(range(width)):
            raise ModelError(
                f"{type(self._model).__name__}: uses numbers of {path!r} that no collection looks up"
                f"{line_of(next(iter(node.users)))}: pass them as a separate tensor"
            )

    def _tensor_of_ids(self, path: str, node: fx.Node) -> fx.Node:
        """The tensor of the example at `path`, computed from the ids of its keys."""
        columns = {key: source.columns for key, source in self._signature.id_columns.items() if source.path == path}
        blocks = [
            self._calls.method("view", self._copies[ids_of(key)], -1, len(group)) for key, group in columns.items()
        ]
        joined = blocks[0] if len(blocks) == 1 else self._calls.operator(torch.ops.aten.cat, blocks, 1)
        joined_columns = [column for group in columns.values() for column in group]
        if joined_columns != sorted(joined_columns):
            order = torch.tensor([joined_columns.index(column) for column in range(len(joined_columns))])
            joined = self._calls.operator(torch.ops.aten.index_select, joined, 1, self._attribute(order))
        example = node.meta["val"]
        cast = self._calls.operator(torch.ops.aten.to, joined, example.dtype)
        return self._calls.method("view", cast, -1, *example.shape[1:])

    def _attribute(self, tensor: Tensor) -> fx.Node:
        """A tensor of the model, or a constant."""
        name = self._state_names.get(id(tensor))
        if name is None:
            constants = (constant for constant, value in self._root.items() if value is tensor)
            name = next(constants, f"{_CONSTANT}{len(self._root)}")
        self._root[name] = tensor
        return self._graph.get_attr(name)

    def _convert_node(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(attribute_of(self._module, str(node.target)))
        if self._is_batch_size(node):
            return self._calls.method("size", self._embeddings, 0)
        args = fx.map_arg(node.args, self._copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._copies.__getitem__)
        name = str(node.target)
        if name == "aten.linear.default" and (layer := self._layer(node)) is not None:
            return self._graph.call_module(layer, (args[0],))
        return self._calls.convert(node, args, kwargs)

    def _layer(self, node: fx.Node) -> str | None:
        """The path of the nn.Linear of the model that a node computes, or None."""
        weight, bias = (self._tensor(argument) for argument in (*node.args[1:], None, None)[:2])
        path, _, leaf = self._state_names.get(id(weight), "").rpartition(".")
        layer = self._model.get_submodule(path) if leaf == "weight" and path else None
        if layer is None or type(layer) is not nn.Linear or layer.bias is not bias:
            return None
        self._root[path] = layer
        return path

    def _tensor(self, node: Any) -> Tensor | None:
        """The tensor of the model that a node is, or None."""
        is_attribute = isinstance(node, fx.Node) and node.op == "get_attr"
        return attribute_of(self._module, str(node.target)) if is_attribute else None
