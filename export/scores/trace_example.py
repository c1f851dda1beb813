"""Trace a model by torch.export from one call of it, and split it at its collections."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, fx, nn

from export.capture.bags import Bag
from export.capture.call_signature import Signature
from export.capture.graph_inputs import DenseInputs, ids_of, lengths_of, numbers_of, rows_of, weights_of
from export.capture.graph_nodes import rows_read_by
from export.capture.id_provenance import locate_ids, with_shared_lengths
from export.capture.lower_to_torchscript import lower_to_torchscript
from export.capture.output_names import named_outputs, renamed_outputs
from export.capture.per_id_inputs import KeysOfInputs, find_keys_of_inputs
from export.capture.read_signature import read_signature
from export.capture.row_counts import Answer, Input, RowCounts
from export.capture.stub_collections import Collections, keys_of_features
from export.capture.trace import EMBEDDINGS, TracedModel, trace_model
from export.config import Example
from export.errors import ModelError
from export.scores.dense_subgraph import DenseSubgraph
from export.trained.wrapped_collections import takes_weights
from serving.bundle.scores import INPUT_DTYPES, DenseInput, InputDtype, JaggedInput, JaggedKind, wrong_names

# The samples that a model is traced for, and those of a probe.
_TRACED_SAMPLES = 7
_PROBE_SAMPLES = 64
# Dtypes that requests bring as FP32.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class TracedExample:
    """A model that was traced from an example.

    Attributes:
        signature: what its arguments are made of.
        graph: of its forward.
        collections: of the model.
        undecided: why the key of some dense inputs with a row for each id could not be decided, by name.
    """

    signature: Signature
    graph: TracedModel
    collections: Collections
    undecided: Mapping[str, str]

    def split(self, model: nn.Module) -> tuple[DenseSubgraph, tuple[DenseInput, ...], list[str]]:
        """The dense subgraph, its dense inputs, and a line for each part of the example that requests do not bring.

        Raises:
            ModelError: the model cannot be served, naming the line.
        """
        self._expect_no_autocast(model)
        module, used, outputs = lower_to_torchscript(model, self.graph, self.signature, self.collections)
        self._expect_requests_bring(model, used)
        paths = [path for path in used if isinstance(path, str) and path != EMBEDDINGS]
        dense_inputs = self._dense_inputs(paths, used)
        for wrong in wrong_names([dense.name for dense in dense_inputs], [*outputs]):
            raise ModelError(f"{type(model).__name__}: {wrong}")

        def eager_answer(eager_model: nn.Module, inputs: DenseInputs) -> Mapping[str, Tensor]:
            rows = torch.arange(inputs.samples) % self.signature.samples
            by_sample = {path: tensor[rows].clone() for path, tensor in self.signature.by_sample.items()}
            for path, tensor in zip(paths, inputs.dense, strict=True):
                by_sample[path] = tensor.to(self.signature.by_sample[path].dtype)
            call = self.signature.called(inputs.samples, inputs.bags, by_sample)
            tensors, _ = named_outputs(eager_model, call.answer_of(eager_model), Tensor)
            return {name: tensors[name].movedim(output.dim, 0) for name, output in outputs.items()}

        subgraph = DenseSubgraph(
            type(model).__name__,
            module,
            tuple(paths),
            tuple(outputs),
            eager_answer,
            jagged=tuple(_jagged(used)),
            by_id={name: output.key for name, output in outputs.items() if output.key is not None},
            is_timeless=True,
        )
        return subgraph, dense_inputs, [*self._notes(used, outputs)]

    def probe_inputs(self, subgraph: DenseSubgraph) -> DenseInputs:
        """The inputs of the dense part for samples drawn from the example, with random embeddings and rows.

        Lengths are fixed for keys that the forward makes itself, and for keys that the dense part takes.
        """
        key_of_feature = keys_of_features(self.collections)
        used = {self.signature.key_of(jagged, key_of_feature) for jagged in subgraph.jagged}
        fixed = {
            key: count
            for key, count in self.signature.fixed.items()
            if key in used or key in self.signature.id_columns
        }
        signature = replace(self.signature, fixed=fixed)
        return _random_inputs(signature, self.collections, _PROBE_SAMPLES, subgraph.input_names)

    def _expect_no_autocast(self, model: nn.Module) -> None:
        for node in self.graph.module.graph.nodes:
            if "autocast" in str(node.target):
                raise ModelError(
                    f"{type(model).__name__}: its forward enters autocast: expected `.to(dtype)` of what is to be in "
                    "another dtype; or none, and dense_dtype (--dense-dtype)"
                )

    def _dense_inputs(self, paths: Iterable[str], used: tuple[Input, ...]) -> tuple[DenseInput, ...]:
        """The dense inputs with a row for each sample, then those with a row for each id of a key."""
        nodes = (node for node in self.graph.module.graph.nodes if node.op == "placeholder")
        placeholders = dict(zip(self.graph.inputs, nodes, strict=True))
        bags = self.signature.bags()
        return (
            *(_dense_input(path, self.signature.by_sample[path], placeholders[path]) for path in paths),
            *(
                _dense_input(
                    jagged.name, bags[jagged.name].ids, placeholders[jagged], self.signature.numbers[jagged.name]
                )
                for jagged in _numbers(used)
            ),
        )

    def _expect_requests_bring(self, model: nn.Module, used: tuple[Input, ...]) -> None:
        """Refuse a dense part that takes ids, lengths or weights which requests do not bring."""
        keys = {key for columns in self.collections.values() for key in columns.keys}
        features = {name for columns in self.collections.values() for name in columns.features}
        weighted_keys = {
            key
            for collection, columns in self.collections.items()
            if takes_weights(collection)
            for key in columns.keys
        }
        for jagged in _jagged(used):
            name = jagged.name
            if jagged.kind is JaggedKind.WEIGHTS and name in keys - weighted_keys:
                raise ModelError(
                    f"{type(model).__name__}: uses the weights of {name!r}, and the collection that looks it up "
                    "takes none (is_weighted): no request would bring them: give them as the values of a "
                    "JaggedTensor of their own"
                )
            if name not in keys | features and jagged.kind is not JaggedKind.NUMBERS:
                raise ModelError(f"{type(model).__name__}: uses {self._why_not_brought(jagged, used)}")

    def _why_not_brought(self, jagged: JaggedInput, used: tuple[Input, ...]) -> str:
        name = jagged.name
        if sum(name in kjt.keys() for kjt in self.signature.keyed.values()) > 1:  # noqa: SIM118  no mapping
            return (
                f"{name!r}, of several KeyedJaggedTensors: a request brings it once: expected a key of its own in "
                "each"
            )
        if jagged.kind is JaggedKind.WEIGHTS:
            return f"{name!r}, for its weights, and no collection looks it up: requests bring weights of ids alone"
        if jagged.kind is JaggedKind.LENGTHS and ids_of(name) not in used:
            return (
                f"how many numbers {name!r} has in each sample, and none of these: no request would say it: give it "
                "as a tensor [B]"
            )
        return (
            f"{name!r}, which no collection looks up, and {self.undecided.get(name, 'it is of no key')}: requests "
            "bring ids of tables; a number for each id of one key, whose rows the forward puts it beside "
            "(rows.values() * numbers.values(), or both padded); and tensors of one shape for each sample: give it "
            f"as one of these, such as a tensor [B, n] that {name!r} is padded to before the model (to_padded_dense)"
        )

    def _notes(self, used: tuple[Input, ...], outputs: Mapping[str, Answer]) -> Iterator[str]:
        signature = self.signature
        paths_of_ids = {source.path for source in signature.id_columns.values()}
        unused = [path for path in signature.by_sample if path not in used and path not in paths_of_ids]
        if unused:
            yield f"example: requests do not bring {', '.join(unused)}: no score needs it"
        if signature.constants:
            yield f"example: {', '.join(signature.constants)} stays as it is in the example, for all requests"
        if signature.checks.lines:
            yield f"example: requests are not checked as the forward does{' and'.join(signature.checks.lines)}"
        if left_out := [*(name for name in self.graph.outputs if name not in outputs), *self.graph.left_out]:
            yield f"example: the outputs {', '.join(left_out)} are left out: they have no row for each sample, or id"
        yield from (f"example: {line}" for line in renamed_outputs(outputs))
        for name, output in outputs.items():
            if output.dim:
                yield f"example: the output {name} has its rows in dimension {output.dim}: they come first in answers"
        for jagged in _numbers(used):
            key = signature.numbers[jagged.name]
            yield f"example: {jagged.name} has a row for each id of {key}, and comes as a dense input"


def trace_example(model: nn.Module, collections: Collections, example: Example) -> TracedExample:
    """Trace a model from one call of it, and check that ids reach its collections unchanged.

    Args:
        model: a copy.
        collections: of the model.
        example: the call.

    Raises:
        ModelError: the model cannot be traced, or changes ids; naming the line.
    """
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{type(model).__name__}: {name or 'it'} is TorchScript, which torch.export does not follow: "
                "expected the module that it was made of"
            )
    signature = read_signature(model, collections, example)
    inputs, graph = _trace(model, collections, signature)
    owners = _owners(signature, graph, collections)
    if owners.keys:
        signature = replace(signature, numbers=owners.keys)
        inputs, graph = _trace(model, collections, signature)
    sizes = RowCounts(graph.module.graph, graph.inputs, signature, keys_of_features(collections))
    signature = replace(signature, fixed=sizes.fixed(), first=sizes.first())
    signature = with_shared_lengths(signature, graph, inputs, collections)
    signature = locate_ids(model, signature, graph, inputs, collections)
    return TracedExample(signature, graph, collections, owners.undecided)


def _jagged(used: Iterable[Input]) -> Iterator[JaggedInput]:
    """The ids, lengths, weights, rows and numbers among the inputs of a dense part."""
    return (name for name in used if isinstance(name, JaggedInput))


def _numbers(used: Iterable[Input]) -> Iterator[JaggedInput]:
    """The dense inputs with a row for each id of a key, among the inputs of a dense part."""
    return (jagged for jagged in _jagged(used) if jagged.kind is JaggedKind.NUMBERS)


def _owners(signature: Signature, graph: TracedModel, collections: Collections) -> KeysOfInputs:
    """The key of each JaggedTensor that no collection looks up. The graph takes the lengths of each."""
    key_of_feature = keys_of_features(collections)
    nodes = (node for node in graph.module.graph.nodes if node.op == "placeholder")
    keys = {jagged: signature.key_of(jagged, key_of_feature) for jagged in _jagged(graph.inputs)}
    inputs = dict(zip(nodes, graph.inputs, strict=True))
    return find_keys_of_inputs(graph.module.graph, inputs, keys, signature.unkeyed, signature.parts, signature.bags())


def _trace(
    model: nn.Module, collections: Collections, signature: Signature
) -> tuple[dict[Input, Tensor], TracedModel]:
    """Example inputs of a graph, and the graph."""
    inputs = _graph_inputs(signature, collections)
    errors: list[ModelError] = []
    for counts in _fixed_counts(signature, collections):
        try:
            return inputs, trace_model(model, collections, signature, inputs, counts)
        except ModelError as error:
            errors.append(error)
    raise ModelError(f"{errors[0]}{_advice_for_flat_tensor(signature)}") from errors[0]


def _advice_for_flat_tensor(signature: Signature) -> str:
    """What to do about a tensor of the example that seems to have a number for each id of a key, or ""."""
    key_of_count = {len(bag.ids): key for key, bag in signature.bags().items()}
    for path in signature.constants:
        leaf = signature.call.leaves[path]
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] in key_of_count:
            return (
                f": {path!r} stays as it is in the example: if it has a number for each id of "
                f"{key_of_count[leaf.shape[0]]!r}, give it as a JaggedTensor with the lengths of these"
            )
    return ""


def _fixed_counts(signature: Signature, collections: Collections) -> list[dict[str, int]]:
    """The keys that are traced for the number of ids in each sample that the example has: none, then those whose rows
    the forward gets, then all."""
    every: dict[str, int] = {}
    for key, bag in signature.bags().items():
        lengths = {*bag.lengths.tolist()}
        if key not in signature.unkeyed and len(lengths) == 1 and 0 not in lengths:
            every[key] = int(lengths.pop())
    keys_with_rows = {key for columns in collections.values() if not columns.spans for key in columns.keys}
    with_rows = {key: count for key, count in every.items() if key in keys_with_rows}
    return [{}, *(counts for counts in (with_rows, every if every != with_rows else {}) if counts)]


def _dense_input(path: str, tensor: Tensor, placeholder: fx.Node, key: str | None = None) -> DenseInput:
    if tensor.is_complex():
        raise ModelError(f"{path}: expected real numbers, which requests bring, got {tensor.dtype}: give both parts")
    if tensor.dtype is torch.float64:
        large = tensor[tensor.abs() > 2**24]
        if not torch.equal(large, large.float().double()):
            raise ModelError(
                f"{path}: has float64 numbers above 2**24, such as {large[0].item()}: requests bring FP32, which "
                "rounds them: give integers, such as whole seconds, or the difference from a number that is near"
            )
    dtype = InputDtype.FP32 if tensor.dtype in _FLOATS else _integer_dtype(tensor.dtype)
    if dtype is None:
        known_dtypes = [*_FLOATS, *(integer for integer in INPUT_DTYPES if integer != np.float32)]
        expected = ", ".join(str(name).removeprefix("torch.") for name in known_dtypes)
        raise ModelError(f"{path}: expected one of {expected}, got {tensor.dtype}: give another")
    rows = rows_read_by(placeholder) if dtype.is_integer else None
    return DenseInput(path, tuple(tensor.shape[1:]), dtype, rows, key)


def _integer_dtype(dtype: torch.dtype) -> InputDtype | None:
    """The dtype of an input of integers or booleans, or None if requests cannot bring it."""
    with suppress(TypeError):  # numpy lacks some dtypes of torch
        return INPUT_DTYPES.get(torch.zeros((), dtype=dtype).numpy().dtype)
    return None


def _graph_inputs(signature: Signature, collections: Collections) -> dict[Input, Tensor]:
    """All that a request may bring, for samples of the example, with random embeddings and rows."""
    probe = _random_inputs(signature, collections, _TRACED_SAMPLES, tuple(signature.by_sample))
    inputs: dict[Input, Tensor] = {EMBEDDINGS: probe.embeddings}
    inputs |= dict(zip(signature.by_sample, probe.dense, strict=True))
    for key, bag in probe.bags.items():
        if key in signature.fixed:
            continue
        if key in signature.numbers:
            inputs[numbers_of(key)] = bag.ids
        else:
            inputs[ids_of(key)] = bag.ids
            inputs[lengths_of(key)] = bag.lengths
        if bag.weights is not None:
            inputs[weights_of(key)] = bag.weights
    return inputs | {rows_of(name): rows for name, rows in probe.rows.items()}


def _random_inputs(
    signature: Signature, collections: Collections, samples: int, input_names: tuple[str, ...]
) -> DenseInputs:
    """Inputs of a dense part: samples drawn from the example, each once or more, with random embeddings and rows."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(signature.samples, (samples,), generator=generator)
    chosen[: signature.samples] = torch.arange(min(samples, signature.samples))
    bags = {key: _traceable(bag.select(chosen)) for key, bag in signature.bags().items()}
    width = max((last for columns in collections.values() for _, last in columns.spans), default=0)
    keys: dict[str, str] = {}
    rows: dict[str, Tensor] = {}
    for columns in collections.values():
        if columns.spans:
            continue
        for feature, key, dim in zip(columns.features, columns.keys, columns.dims, strict=True):
            keys[feature] = key
            count = len(bags[key].ids) if key in bags else signature.fixed[key] * samples
            rows[feature] = torch.randn(count, dim, generator=generator)
    return DenseInputs(
        torch.randn(samples, width, generator=generator),
        tuple(signature.by_sample[path][chosen] for path in input_names),
        bags,
        rows,
        {**keys, **signature.numbers},
        signature.fixed,
        signature.first,
    )


def _traceable(bag: Bag) -> Bag:
    """A bag with two ids or more: torch.export takes the sizes 0 and 1 for constants."""
    if len(bag.ids) > 1:
        return bag
    ids = bag.ids.new_zeros(len(bag.lengths), *bag.ids.shape[1:])
    weights = None if bag.weights is None else torch.ones(len(ids), dtype=bag.weights.dtype)
    return Bag(ids, torch.ones_like(bag.lengths), weights)
