"""Follow the forward of a model, and cut it behind its collections: pooled embeddings take their place.

Its collections are single steps. What cannot be followed is refused by its line.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torchrec import KeyedTensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import kjt_of_bags
from export.capture.graph_inputs import DenseInputs
from export.capture.output_names import named_outputs, not_tensors
from export.capture.stub_collections import Columns, joined
from export.capture.trace import EMBEDDINGS
from export.errors import ModelError, first_line
from export.trained.follow import selects
from export.trained.keyed_tracer import KeyedTracer
from export.trained.managed import inner_of
from export.trained.running import evaluating, quiet
from export.trained.source_location import line_of, line_of_error
from serving.bundle.scores import JaggedInput, wrong_names

WAY_OUT = (
    "give an example of a call (example=…, --example) if there is none, or dense=…, a module of your own that takes "
    "pooled embeddings, or export without --scores"
)


def traced(entry: nn.Module, collections: Collection[nn.Module]) -> fx.GraphModule:
    """The whole forward of `entry` as a graph. Its modules are those of `entry`.

    Args:
        entry: the model.
        collections: each call of one is a node.

    Raises:
        ModelError: naming the line of the model's code that cannot be followed.
    """
    with evaluating(entry), quiet():
        try:
            return fx.GraphModule(entry, _Tracer(collections).trace(entry), type(entry).__name__)
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"{type(entry).__name__}: its forward cannot be followed{line_of_error(error)}: "
                f"{first_line(error)}: {WAY_OUT}"
            ) from error


class _Tracer(KeyedTracer):
    record_stack_traces = True

    def __init__(self, collections: Collection[nn.Module]) -> None:
        super().__init__()
        self._collections = collections

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._collections or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True, slots=True)
class DenseSubgraph:
    """What follows the collections of a model.

    Attributes:
        module: takes the embeddings, float32 or float16 [B, D], the dense inputs and `jagged`; returns tensors.
        inputs, outputs: names of the dense inputs, and of the tensors.
        answer: what a model itself answers, by output, to ids by key and dense inputs.
        jagged, by_id: what it takes of ids; and the outputs with a row for each id of a key, and that key.
        is_timeless: whether no answer hangs on a clock.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    answer: Callable[[nn.Module, DenseInputs], Mapping[str, torch.Tensor]]
    jagged: tuple[JaggedInput, ...] = ()
    by_id: Mapping[str, str] = field(default_factory=dict)
    is_timeless: bool = False


def split_at_collections(entry: nn.Module, collections: Mapping[nn.Module, Columns]) -> DenseSubgraph:
    """Cut `entry` behind its collections.

    Args:
        entry: the model.
        collections: where the embeddings of each are.

    Raises:
        ModelError: its forward cannot be followed; it uses ids otherwise than in its collections; or it has an
            argument or answers that cannot be served.
    """
    module = traced(entry, collections)
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(iter(graph.nodes))):
        given = graph.placeholder(EMBEDDINGS)
        embeddings = graph.call_method("float", (given,))
    _expect_one_argument_for_each_key(entry, module, collections)
    ids = _replace_calls(module, collections, embeddings)
    _erase_selections(graph, ids)
    for node in placeholders:
        if node.name in ids:
            _check_unused(entry, node)
            graph.erase_node(node)
        elif node.args and not node.users:  # it has its default
            graph.erase_node(node)
        elif node.args or str(node.target).startswith("*"):
            raise ModelError(
                f"{type(entry).__name__}: argument {node.target!r} has a default, or stands for several: requests "
                f"have all dense inputs, by name: {WAY_OUT}"
            )
    left = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    inputs = tuple(name for name in left if name != EMBEDDINGS)

    def answer(model: nn.Module, given: DenseInputs) -> Any:
        kjt = kjt_of_bags(given.bags)
        return model(**dict.fromkeys(ids, kjt), **dict(zip(inputs, given.dense, strict=True)))

    return finished(entry, module, inputs, answer)


def finished(
    model: nn.Module,
    module: fx.GraphModule,
    inputs: tuple[str, ...],
    answer: Callable[[nn.Module, DenseInputs], Any],
) -> DenseSubgraph:
    """What follows collections, ready to be compiled.

    Args:
        model: that it was made of.
        module: takes the embeddings and `inputs`; answers as the model does.
        inputs: its arguments but for ids.
        answer: what the model answers.

    Raises:
        ModelError: its answers are no tensors, or a name cannot be served.
    """
    outputs = _name_outputs(model, module.graph)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.type = torch.Tensor
    for wrong in wrong_names(inputs, outputs):
        raise ModelError(f"{type(model).__name__}: {wrong}")
    module.graph.lint()
    # Made anew: it has what the graph names. delete_all_unused_submodules would empty the model's own collections.

    def named(of: nn.Module, given: DenseInputs) -> Mapping[str, torch.Tensor]:
        found = answer(of, given)
        tensors, _ = named_outputs(model, found, Tensor, WAY_OUT)
        if list(tensors) != list(outputs):
            raise not_tensors(model, type(found).__name__, WAY_OUT)
        return tensors

    return DenseSubgraph(fx.GraphModule(module, module.graph, type(model).__name__), inputs, outputs, named)


def changes_inputs(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a dense part writes to what it takes; torch counts that."""
    given = [each.clone() for each in inputs]
    with torch.no_grad():
        module(*given)
    return any(each._version for each in given)


def keep_inputs(module: fx.GraphModule) -> None:
    """Have a dense part write to copies of what it takes."""
    for node in [each for each in module.graph.nodes if each.op == "placeholder"]:
        given = as_taken(node)
        with module.graph.inserting_after(given):
            kept = module.graph.call_method("clone", (given,))
        given.replace_all_uses_with(kept, partial(operator.is_not, kept))
    module.recompile()


def as_taken(argument: fx.Node) -> fx.Node:
    """An argument of a dense part as its steps take it: in their dtype, which it is brought to first."""
    return next((user for user in argument.users if user.target in ("float", torch.ops.aten.to)), argument)


def _erase_selections(graph: fx.Graph, ids: Sequence[str]) -> None:
    """Erase what only chose ids for collections. All else stays, used or not: it may write to what is used."""
    chosen = {node for node in graph.nodes if node.name in ids}
    for node in graph.nodes:
        if selects(node) and {*node.all_input_nodes} <= chosen and node.all_input_nodes:
            chosen.add(node)
    for node in reversed(graph.nodes):
        if node in chosen and node.op != "placeholder" and not node.users:
            graph.erase_node(node)


def _expect_one_argument_for_each_key(
    entry: nn.Module, module: fx.GraphModule, collections: Mapping[nn.Module, Columns]
) -> None:
    """Refuse a model that looks a key up from several arguments: a request has one bag of it for each sample."""
    argument: dict[str, str] = {}
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called is None or called not in collections:
            continue
        for config in inner_of(called)[1].embedding_bag_configs():
            for key in config.feature_names:
                root = str(_root(node).target)
                if argument.setdefault(key, root) != root:
                    raise ModelError(
                        f"{type(entry).__name__}: looks key {key!r} up from the arguments {argument[key]!r} and "
                        f"{root!r}, a request has it once{line_of(node)}: give each argument keys of its own"
                    )


def _replace_calls(
    module: fx.GraphModule, collections: Mapping[nn.Module, Columns], embeddings: fx.Node
) -> list[str]:
    """Put embeddings in the place of each call of a collection; the arguments that ids came from."""
    graph, ids = module.graph, list[str]()
    narrow = partial(graph.call_function, torch.narrow)
    for node in list(graph.nodes):
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if called is None or (columns := collections.get(called)) is None:
            continue
        ids.append(_root(node).name)
        with graph.inserting_before(node):
            pieces = [narrow((embeddings, 1, first, last - first)) for first, last in joined(columns.spans)]
            pooled = pieces[0] if len(pieces) == 1 else graph.call_function(torch.cat, (pieces, 1))
            if isinstance(called, BaseManagedCollisionEmbeddingCollection):
                _take_embeddings(node)
            for user in [each for each in node.users if each.target == "values"]:
                user.replace_all_uses_with(pooled)
                graph.erase_node(user)
            if node.users:
                widths = [last - first for first, last in columns.spans]
                node.replace_all_uses_with(graph.call_function(KeyedTensor, (list(columns.names), widths, pooled)))
        graph.erase_node(node)
    return list(dict.fromkeys(ids))


def _take_embeddings(call: fx.Node) -> None:
    """Make the users of a collection that answers (embeddings, remapped ids) those of the embeddings alone."""
    for user in list(call.users):
        is_element = user.op == "call_function" and user.target is operator.getitem
        if is_element and (user.args[1] == 0 or not user.users):
            user.replace_all_uses_with(call)
            call.graph.erase_node(user)
        else:
            raise ModelError(
                f"{call.target}: expected its embeddings alone to be used, [0] of its answer: remapped ids are not "
                f"served{line_of(user)}: {WAY_OUT}"
            )


def _root(node: fx.Node) -> fx.Node:
    """The argument of the model that a collection's ids are selected from. It was checked that they are."""
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node


def _check_unused(entry: nn.Module, ids: fx.Node) -> None:
    """Refuse a model that uses ids for more than lookups."""
    for user in ids.users:
        raise ModelError(
            f"{type(entry).__name__}: uses {ids.target!r} beside its collections, too{line_of(user)}: {WAY_OUT}"
        )


def _name_outputs(entry: nn.Module, graph: fx.Graph) -> tuple[str, ...]:
    """Make the answers of a graph a tuple of tensors."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    answer: Any = output.args[0]
    made = None
    if isinstance(answer, fx.Node) and hasattr(answer.target, "_fields"):  # how torch.fx keeps a named tuple
        made, kind = answer, cast(Any, answer.target)
        answer = kind(*answer.args, **answer.kwargs)
    named, _ = named_outputs(entry, answer, fx.Node, WAY_OUT)
    with graph.inserting_before(output):
        output.type = None
        output.args = (tuple(named.values()),)
    if made is not None:
        graph.erase_node(made)
    return tuple(named)
