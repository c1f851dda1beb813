"""Trace a model by torch.export from one call of it: a graph of what follows its collections, for any batch size.

The answers of collections are inputs of the graph. The ids of a KJT of the example reach a collection unchanged. For
a KJT that the forward makes itself, `export.capture.id_provenance` checks the ids in the graph.
"""

import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchrec import KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import Bag, RequestKjt
from export.capture.branch_log import BranchLog
from export.capture.call_signature import Signature
from export.capture.check_dynamic_shapes import expect_any_number
from export.capture.export_patches import traceable
from export.capture.graph_inputs import ids_of, lengths_of, numbers_of, weights_of
from export.capture.graph_nodes import answers_of
from export.capture.output_names import named_outputs
from export.capture.outside_reads import expect_no_clocks
from export.capture.row_counts import Input, dims_of_keys, is_lengths
from export.capture.simplify_graph import simplified
from export.capture.stub_collections import Collections, jagged_tensors, keyed_tensor, keys_of_features, stubbed
from export.capture.value_checks import failed_check
from export.errors import ModelError, first_line
from export.trained.source_location import current_line, line_of_error
from export.trained.wrapped_collections import is_sequence, takes_weights
from serving.bundle.scores import JaggedInput, JaggedKind

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class ForwardKjt:
    """A KJT that the forward makes itself.

    Attributes:
        keys: its keys.
        is_weighted: whether the collection that gets it takes weights.
        is_raw: whether any int64 is an id of it.
        line: the line of the model's code at which the collection gets it.
    """

    keys: Sequence[str]
    is_weighted: bool
    is_raw: bool
    line: str


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a graph of ATen.

    Attributes:
        module: takes `inputs`, in order. Returns the outputs of the model, in order; then the values, lengths and, if
            its collection uses them, weights of each of `made_kjts`; then `counts`.
        inputs: its inputs.
        outputs: the names of its outputs.
        left_out: the names of outputs that have no row for each sample, because they are not tensors.
        made_kjts: the KJTs that the forward makes itself and gives to a collection.
        counts: by name, the lengths of each input with a number for each id of a key, as the forward gets them.
    """

    module: fx.GraphModule
    inputs: Sequence[Input]
    outputs: Sequence[str]
    left_out: Sequence[str]
    made_kjts: Sequence[ForwardKjt]
    counts: Mapping[str, fx.Node]


def trace_model(
    model: nn.Module,
    collections: Collections,
    signature: Signature,
    inputs: Mapping[Input, Tensor],
    counts: Mapping[str, int],
) -> TracedModel:
    """Trace a model.

    Args:
        model: a copy.
        collections: of the model.
        signature: of the model.
        inputs: the inputs of the graph, `embeddings` first, with an example of each; of two samples or more.
        counts: the number of ids in every sample, for keys that are traced for one number only.

    Raises:
        ModelError: naming the line of the model's code that cannot be traced.
    """
    expect_no_clocks(model, signature.clocks)
    wrapper = _TensorArguments(model, collections, signature, list(inputs))
    key_of_feature = keys_of_features(collections)
    keys = (
        None if isinstance(name, str) or is_lengths(name) else signature.key_of(name, key_of_feature)
        for name in inputs
    )
    dims = dims_of_keys(keys, {**counts, **signature.fixed})
    arguments = tuple(inputs.values())
    module, log = _trace(wrapper, arguments, dims)
    names = [*signature.numbers]
    counted = answers_of(module.graph)[-len(names) :] if names else []
    recorded = wrapper.recorded
    traced = TracedModel(
        module,
        wrapper.inputs,
        recorded.outputs,
        recorded.left_out,
        recorded.made_kjts,
        dict(zip(names, counted, strict=True)),
    )

    def trace_flipped(branches: Collection[int]) -> fx.GraphModule | None:
        try:
            return _trace(wrapper, arguments, dims, branches)[0]
        except ModelError as error:
            if failed_check(error.__cause__):
                return None
            raise

    expect_any_number(model, module, wrapper.inputs, dims, log, trace_flipped)
    return traced


def _trace(
    wrapper: "_TensorArguments",
    arguments: tuple[Tensor, ...],
    dims: tuple[dict[int, Any], ...],
    flipped: Collection[int] = (),
) -> tuple[fx.GraphModule, BranchLog]:
    name = type(wrapper.model).__name__
    with traceable(wrapper.model, wrapper.signature.checks, flipped) as log, redirect_stderr(io.StringIO()):
        try:
            program = torch.export.export(wrapper, arguments, dynamic_shapes=(dims,), strict=False)
        except ModelError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ModelError(f"{name}: {_refusal(error, log)}") from error
        if log.swallowed:
            raise ModelError(
                f"{name}: a step cannot be traced{log.swallowed[0]}, and the model's code catches that error: "
                "expected the same steps in a trace as in a call"
            )
        return simplified(program.module(check_guards=False)), log


def _refusal(error: Exception, log: BranchLog) -> str:
    """Why a forward cannot be traced.

    Args:
        error: of torch.export.
        log: what it decided.
    """
    message, lines = first_line(error), [*dict.fromkeys(line for _, line in log.guards if line)]
    if log.packed:
        return (
            f"its forward packs sequences{log.packed[0]}, which a graph cannot do: pass the layer padded sequences, "
            "[B, n, width], and take the output at the last position of each sample: output[torch.arange(B), lengths "
            "- 1]"
        )
    is_data_dependent, is_fixed = "data-dependent" in message, message.startswith("Constraints violated")
    one_by_one = [*log.loops, *(line for line in lines if ".tolist()" in line or ".to_dense()" in line)]
    if one_by_one and (is_data_dependent or is_fixed):
        return (
            f"its forward loops over samples or ids{one_by_one[0]}: a graph would have a step for each one in the "
            "example: compute all of them at once on whole tensors, with a mask of lengths for missing positions"
        )
    if is_fixed:
        location = f": see{' and'.join(lines)}" if lines else ""
        return (
            "its forward works for the number of samples of the example only, or torch.export cannot show that it "
            f"works for others{location}: use sizes of tensors (x.size(0), x.shape), not numbers of the example or "
            "lists as long as a batch"
        )
    line = line_of_error(error)
    if is_data_dependent:
        return f"what its forward does depends on numbers of the request{line}: {message}: {_way_out(line)}"
    return f"its forward cannot be traced for any number of samples{line}: {message}"


def _way_out(line: str) -> str:
    """What a user can do about a line that depends on numbers of the request."""
    if not any(f"`{word} " in line for word in ("if", "elif", "while", "assert")) and " if " not in line:
        return "use a constant, such as the longest sequence that the model was trained with"
    if any(count in line for count in ("numel()", "len(", "size(0)", "shape[0]")):
        return (
            "remove the branch if its steps work for an empty tensor, as most operators do, or choose a result by "
            "torch.where"
        )
    return (
        "replace the branch by steps that are the same for all numbers: torch.where(condition, one, other), or a "
        "factor of 0 or 1"
    )


@dataclass(slots=True)
class _Recorded:
    """What a trace records. It is no attribute of the module, because torch.export restores these after a forward."""

    outputs: Sequence[str] = ()
    made_kjts: Sequence[ForwardKjt] = ()
    left_out: Sequence[str] = ()


class _TensorArguments(nn.Module):
    """Calls a model with arguments made of tensors."""

    def __init__(
        self, model: nn.Module, collections: Collections, signature: Signature, inputs: Sequence[Input]
    ) -> None:
        super().__init__()
        self.model = model
        self.collections, self.signature, self.inputs = collections, signature, inputs
        self.recorded = _Recorded()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.inputs, tensors, strict=True))
        rows = {
            name.name: tensor
            for name, tensor in values.items()
            if isinstance(name, JaggedInput) and name.kind is JaggedKind.ROWS
        }
        made_kjts: list[ForwardKjt] = []
        parts: list[Tensor] = []

        def answer(collection: nn.Module, columns: Any, kjt: KeyedJaggedTensor) -> Any:
            if type(kjt) is not RequestKjt or not kjt.is_unchanged:
                is_weighted = takes_weights(collection)
                is_raw = isinstance(collection, BaseManagedCollisionEmbeddingCollection)
                made_kjts.append(ForwardKjt(kjt.keys(), is_weighted, is_raw, current_line()))
                parts.extend(_parts_of(kjt, is_weighted))
            if is_sequence(collection):
                return jagged_tensors(columns, kjt, rows)
            return keyed_tensor(columns, values[EMBEDDINGS])

        by_sample = {name: tensor for name, tensor in values.items() if isinstance(name, str)}
        bags = _bags(values, self.signature.numbers)
        call = self.signature.called(tensors[0].shape[0], bags, by_sample, as_request_kjts=True)
        with stubbed(self.collections, answer):
            outputs, left_out = named_outputs(self.model, call.answer_of(self.model), Tensor)
        self.recorded.outputs, self.recorded.left_out, self.recorded.made_kjts = list(outputs), left_out, made_kjts
        return (*outputs.values(), *parts, *(bags[name].lengths for name in self.signature.numbers))


def _parts_of(kjt: KeyedJaggedTensor, is_weighted: bool) -> list[Tensor]:
    """The values, lengths and weights of a KJT that a collection looks up, from its cache of `to_dict` if any."""
    if kjt._jt_dict is None:
        return [kjt.values(), kjt.lengths(), *([kjt.weights()] if is_weighted else [])]
    jagged = [kjt._jt_dict[key] for key in kjt.keys()]  # noqa: SIM118  no mapping
    parts = [torch.cat([part.values() for part in jagged]), torch.cat([part.lengths() for part in jagged])]
    return [*parts, *([torch.cat([part.weights() for part in jagged])] if is_weighted else [])]


def _bags(values: Mapping[Input, Tensor], numbers: Mapping[str, str]) -> dict[str, Bag]:
    """The ids of a request by key; and by name, the numbers that a request brings for each id of a key."""
    keys = [name.name for name in values if isinstance(name, JaggedInput) and name.kind is JaggedKind.LENGTHS]
    bags = {key: Bag(values[ids_of(key)], values[lengths_of(key)], values.get(weights_of(key))) for key in keys}
    for name, key in numbers.items():
        # A separate node shows whether the forward uses the lengths of these numbers.
        lengths = torch.ops.aten.alias.default(values[lengths_of(key)])
        bags[name] = Bag(values[numbers_of(name)], lengths, values.get(weights_of(name)))
    return bags
