"""Follow a model by torch.export, from one call of it: what follows its collections, for any number of samples.

The collections answer with inputs of the graph. Ids reach them unchanged: as keys of a KJT of the example; or the
graph says that they are ids of the example in another order, and that nothing else is done to them.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import Bag, RequestKjt
from export.capture.branch_log import BranchLog, branches_on_ids, guard_on_ids, symbols_of
from export.capture.call_signature import Signature
from export.capture.export_patches import traceable
from export.capture.graph_inputs import ids_of, lengths_of, numbers_of, weights_of
from export.capture.graph_nodes import answers_of, attribute_of, inlined
from export.capture.output_names import named_outputs
from export.capture.outside_reads import TIME_ADVICE
from export.capture.row_counts import Input
from export.capture.stub_collections import Collections, jagged_tensors, keyed_tensor, keys_of_features, stubbed
from export.capture.value_checks import failed_check
from export.errors import ModelError, first_line
from export.trained.managed import is_sequence, takes_weights
from export.trained.source_location import current_line, line_of, line_of_error
from serving.bundle.scores import JaggedInput, JaggedKind

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Made:
    """A KJT that the forward makes itself.

    Attributes:
        keys: of it.
        is_weighted: whether the collection that gets it takes weights.
        is_raw: whether any int64 is an id of it.
        line: of the model's code, where the collection gets it.
    """

    keys: Sequence[str]
    is_weighted: bool
    is_raw: bool
    line: str


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of ATen.

    Attributes:
        module: takes `inputs`, in order. Answers the outputs of the model, in order; then, of each of `made`, values,
            lengths, and weights where it has some that count; then `counts`.
        inputs: what it takes.
        outputs: their names.
        left: names of what it answers beside tensors, in a form that has no row for each sample.
        made: the KJTs that a collection gets and that the forward made itself.
        counts: of each name with a number for each id of a key: how many each sample has, as the forward gets it.
    """

    module: fx.GraphModule
    inputs: Sequence[Input]
    outputs: Sequence[str]
    left: Sequence[str]
    made: Sequence[Made]
    counts: Mapping[str, fx.Node]


def trace_model(
    model: nn.Module,
    collections: Collections,
    signature: Signature,
    inputs: Mapping[Input, Tensor],
    counts: Mapping[str, int],
) -> TracedModel:
    """Follow a model.

    Args:
        model: a copy.
        collections: of the model.
        signature: what its arguments are made of.
        inputs: what the graph is to take, `embeddings` first, with an example of each; of two samples or more.
        counts: keys that are followed for so many ids in each sample, and no others.

    Raises:
        ModelError: naming the line of the model's code that cannot be followed.
    """
    whole = _Whole(model, collections, signature, list(inputs))
    dims = _dims(whole, {**counts, **signature.fixed})

    def followed(otherwise: Sequence[int] = (), later_s: int = 0) -> tuple[fx.GraphModule, BranchLog]:
        with traceable(model, signature.checks, otherwise, later_s) as noted, redirect_stderr(io.StringIO()):
            try:
                arguments = tuple(inputs.values())
                program = torch.export.export(whole, arguments, dynamic_shapes=(dims,), strict=False)
            except Exception as error:  # the user's code may raise anything
                if isinstance(error, ModelError):
                    raise
                raise ModelError(f"{type(model).__name__}: {_refusal(error, noted)}") from error
            if noted.caught:
                said = f"a step cannot be followed{noted.caught[0]}, and its code goes on without"
                raise ModelError(f"{type(model).__name__}: {said}: expected the same steps, followed or not")
            return inlined(program.module(check_guards=False)), noted

    def expect_same(what: str, expected: str, otherwise: Sequence[int], later_s: int = 0) -> None:
        try:
            is_same = _are_same(module, followed(otherwise, later_s)[0])
        except ModelError as error:
            is_same = failed_check(error.__cause__)
        if not is_same:  # else it is no part of what is answered, such as a line of a log
            raise ModelError(f"{type(model).__name__}: what its forward does hangs on {what}: expected {expected}")

    module, noted = followed()
    _expect_any_number(model, module, whole.inputs, noted)
    numbers = [*signature.numbers]
    of_numbers = dict(zip(numbers, answers_of(module.graph)[-len(numbers) :] if numbers else (), strict=True))
    found = TracedModel(module, whole.inputs, whole.seen.outputs, whole.seen.left, whole.seen.made, of_numbers)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    samples = nodes[0].meta["val"].shape[0].node
    if of_one := _other_of_one(samples, noted.asked):
        one = f"whether there is one sample{next(iter(of_one.values()))}"
        expect_same(one, "the same steps for any number of samples: requests are merged", [*of_one])
    for number, line in branches_on_ids(samples, noted.asked, _counted(nodes, dims, samples)).items():
        expect_same(f"how many ids there are{line}", _ANY_IDS, [number])
    if others := [line for line in signature.clocks if line not in noted.clock]:  # which cannot be put forward
        raise ModelError(f"{type(model).__name__}: its forward asks for the time{others[0]}: expected {TIME_ADVICE}")
    for later_s in _LATER_S if noted.clock else ():
        expect_same(f"the time{noted.clock[0]}", TIME_ADVICE, (), later_s)
    return found


def _counted(nodes: Sequence[fx.Node], dims: Sequence[Mapping[int, Any]], samples: Any) -> dict[Any, Any]:
    """Sizes of inputs that are a multiple of the number of samples: their symbols, and the multiple of each."""
    is_any = torch.export.Dim.AUTO
    sizes = [node.meta["val"].shape[0].node for node, dim in zip(nodes, dims, strict=True) if dim[0] is not is_any]
    return {size._expr: size.expr for size in sizes if size.expr.free_symbols <= samples.expr.free_symbols}


_OF_VMAP = ("add_batch_dim", "vmap_increment_nesting", "remove_batch_dim")
_ANY_IDS = "the same steps for any number of ids: requests are merged, and have more"
_LATER_S = (3_727, 20_011, 40_009, 61_007, 297_341, 3_456_793, 34_567_891, 345_678_923)  # hours to ten years


def _of_ids(model: nn.Module, line: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__}: what its forward does hangs on how many ids there are{line}: expected {_ANY_IDS}"
    )


def _expect_any_number(model: nn.Module, module: fx.GraphModule, inputs: Sequence[Input], noted: BranchLog) -> None:
    """Refuse a forward that does something else for other numbers of ids: the graph has one of its ways alone.

    Args:
        model: for messages.
        module: the graph.
        inputs: what it takes.
        noted: what torch.export decided.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, each in zip(nodes, inputs, strict=True):
        size = node.meta["val"].shape[0]
        if isinstance(each, JaggedInput) and not isinstance(size, torch.SymInt):
            lines = " and".join(dict.fromkeys(line for _, line in noted.compared if line))
            raise ModelError(
                f"{type(model).__name__}: its forward can be called with {size} ids of {each.name!r} alone"
                f"{lines and ': see' + lines}: take sizes of tensors as they are (x.size(0), "
                "x.shape), not a number of the example, nor lists as long as a batch"
            )
    samples = nodes[0].meta["val"].shape[0].node
    sizes = {symbol for node in nodes for symbol in symbols_of(node.meta["val"].shape)}
    if decided := guard_on_ids(samples, sizes, noted.compared):
        raise _of_ids(model, f"{decided[1]}: {decided[0]}")
    for node in module.graph.nodes:
        if str(getattr(node.target, "__name__", node.target)).lstrip("_") in _OF_VMAP:
            raise ModelError(
                f"{type(model).__name__}: its forward maps a function by torch.vmap{line_of(node)}, which is no "
                "operator of a graph: call the function on whole tensors: torch.matmul and torch.einsum take the "
                "dimension of samples as it is"
            )
        if str(node.target).startswith("aten.squeeze.") and _squeezes_ids(node, samples.expr.free_symbols):
            raise _of_ids(model, f"{line_of(node)}: of one id, squeeze() leaves out its dimension")


def _are_same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs have the same steps, and the same tensors in them."""
    targets = [str(node.target) for node in one.graph.nodes if node.op == "get_attr"]
    if one.code != other.code:
        return False
    pairs = ((attribute_of(one, target), attribute_of(other, target)) for target in targets)
    return all(a is b or (isinstance(a, Tensor) and torch.equal(a, b)) for a, b in pairs)


def _squeezes_ids(node: fx.Node, samples: set[Any]) -> bool:
    """Whether a step leaves out a dimension where there is one id. `samples`: the symbols of their number."""
    value: Any = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else range(value.dim())
    chosen = dims if isinstance(dims, Sequence) else [dims]
    return bool(symbols_of([value.shape[each] for each in chosen]) - samples)


def _other_of_one(samples: Any, asked: Sequence[tuple[Any, bool, str]]) -> dict[int, str]:
    """The comparisons of sizes that come out otherwise for one sample, with their lines. The graph is of more.

    Args:
        samples: the node of the number of samples.
        asked: the comparisons that the model's code does something by.
    """
    found: dict[int, str] = {}
    for number, (comparison, holds, line) in enumerate(asked):
        of_one = samples.shape_env.replace(comparison).xreplace({samples.expr: 1})
        if "`assert " not in line and of_one in (True, False) and bool(of_one) != holds:
            found[number] = line
    return found


def _refusal(error: Exception, noted: BranchLog) -> str:
    """Why a forward cannot be followed.

    Args:
        error: of torch.export.
        noted: what it decided.
    """
    said, lines = first_line(error), [*dict.fromkeys(line for _, line in noted.compared if line)]
    if noted.packed:
        return (
            f"its forward packs sequences{noted.packed[0]}, which a graph cannot: give the layer padded ones, [B, n, "
            "width], and take the output of each sample at its last number: output[torch.arange(B), lengths - 1]"
        )
    one_by_one = [*noted.loops, *(line for line in lines if ".tolist()" in line or ".to_dense()" in line)]
    if one_by_one and ("data-dependent" in said or said.startswith("Constraints violated")):
        return (
            f"its forward goes through samples, or ids, one by one{one_by_one[0]}: a graph would have as many steps "
            "as the example has of them: put the steps for all at once, on whole tensors, with a mask of lengths for "
            "what some samples do not have"
        )
    if said.startswith("Constraints violated"):
        where = f": see{' and'.join(lines)}" if lines else ""
        return (
            "its forward can be called with the number of samples of the example alone, or torch.export cannot tell "
            f"that it can be called with others{where}: take sizes of tensors as they are (x.size(0), x.shape), not "
            "a number of the example, nor lists as long as a batch"
        )
    if "data-dependent" in said:
        line = line_of_error(error)
        return f"what its forward does hangs on numbers of the request{line}: {said}: {_way_without(line)}"
    return f"its forward cannot be followed for any number of samples{line_of_error(error)}: {said}"


def _way_without(line: str) -> str:
    """What to do about a line that hangs on numbers of the request."""
    if not any(f"`{word} " in line for word in ("if", "elif", "while", "assert")) and " if " not in line:
        return "take a number that does not change, such as the longest sequence that it was trained with"
    if any(count in line for count in ("numel()", "len(", "size(0)", "shape[0]")):
        return (
            "leave the branch out, if its steps do nothing for no number: operators take none, too; else choose by "
            "torch.where"
        )
    return (
        "have the same steps for all numbers: torch.where(condition, one, other), or a factor that is 0 or 1, in "
        "place of the branch"
    )


@dataclass(slots=True)
class _Seen:
    """What was seen while a model was followed. torch.export puts back what a forward sets in a module itself."""

    outputs: Sequence[str] = ()
    made: Sequence[Made] = ()
    left: Sequence[str] = ()


class _Whole(nn.Module):
    """A model, with tensors for arguments."""

    def __init__(
        self, model: nn.Module, collections: Collections, signature: Signature, inputs: Sequence[Input]
    ) -> None:
        super().__init__()
        self.model = model
        self.collections, self.signature, self.inputs = collections, signature, inputs
        self.seen = _Seen()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, tensors, strict=True))
        rows = {
            each.name: found
            for each, found in given.items()
            if isinstance(each, JaggedInput) and each.kind is JaggedKind.ROWS
        }
        made: list[Made] = []
        parts: list[Tensor] = []

        def answer(collection: nn.Module, columns: Any, kjt: KeyedJaggedTensor) -> Any:
            if type(kjt) is not RequestKjt or not kjt.is_unchanged:
                is_weighted = takes_weights(collection)
                is_raw = isinstance(collection, BaseManagedCollisionEmbeddingCollection)
                made.append(Made(kjt.keys(), is_weighted, is_raw, current_line()))
                parts.extend(_parts_of(kjt, is_weighted))
            if is_sequence(collection):
                return jagged_tensors(columns, kjt, rows)
            return keyed_tensor(columns, given[EMBEDDINGS])

        by_sample = {each: found for each, found in given.items() if isinstance(each, str)}
        bags = _bags(given, self.signature.numbers)
        call = self.signature.called(tensors[0].shape[0], bags, by_sample, known=True)
        with stubbed(self.collections, answer):
            found, left = named_outputs(self.model, call.answer_of(self.model), Tensor)
        self.seen.outputs, self.seen.left, self.seen.made = list(found), left, made
        return (*found.values(), *parts, *(bags[name].lengths for name in self.signature.numbers))


def _parts_of(kjt: KeyedJaggedTensor, is_weighted: bool) -> list[Tensor]:
    """The values, lengths and weights of a KJT that a collection looks up: those that `to_dict` keeps, if it does."""
    if kjt._jt_dict is None:
        return [kjt.values(), kjt.lengths(), *([kjt.weights()] if is_weighted else [])]
    parts = [kjt._jt_dict[key] for key in kjt.keys()]  # noqa: SIM118  no mapping
    found = [torch.cat([each.values() for each in parts]), torch.cat([each.lengths() for each in parts])]
    return [*found, *([torch.cat([each.weights() for each in parts])] if is_weighted else [])]


def _bags(given: Mapping[Input, Tensor], numbers: Mapping[str, str]) -> dict[str, Bag]:
    """What a request brings of its keys, and `numbers` of the ids of some of them."""
    keys = [each.name for each in given if isinstance(each, JaggedInput) and each.kind is JaggedKind.LENGTHS]
    found = {key: Bag(given[ids_of(key)], given[lengths_of(key)], given.get(weights_of(key))) for key in keys}
    for name, key in numbers.items():
        lengths = torch.ops.aten.alias.default(given[lengths_of(key)])  # who asks for its own, is seen
        found[name] = Bag(given[numbers_of(name)], lengths, given.get(weights_of(name)))
    return found


def _dims(whole: _Whole, counts: Mapping[str, int]) -> tuple[dict[int, Any], ...]:
    """The dimensions of inputs that are not always of one size."""
    samples: Any = torch.export.Dim("samples", min=2)
    key_of = keys_of_features(whole.collections)
    dims = []
    for each in whole.inputs:
        if isinstance(each, str) or each.kind is JaggedKind.LENGTHS:
            dims.append({0: samples})
            continue
        count = counts.get(whole.signature.key_of(each, key_of))
        dims.append({0: torch.export.Dim.AUTO if count is None else count * samples})
    return tuple(dims)
