"""Cut a model behind its collections, as it was followed from one call of it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, fx, nn

from export.capture.bags import Bag
from export.capture.call_signature import Signature, read_signature
from export.capture.graph_inputs import DenseInputs, ids_of, lengths_of, numbers_of, rows_of, weights_of
from export.capture.graph_nodes import rows_read_by
from export.capture.id_provenance import locate_ids, with_shared_lengths
from export.capture.lower_to_torchscript import lower_to_torchscript
from export.capture.output_names import named_outputs, renamed_outputs
from export.capture.per_id_inputs import KeysOfInputs, find_keys_of_inputs
from export.capture.row_counts import Answer, Input, Sizes
from export.capture.stub_collections import Collections, keys_of_features
from export.capture.trace import EMBEDDINGS, TracedModel, trace_model
from export.config import Example
from export.errors import ModelError
from export.scores.split_at_collections import DenseSubgraph
from export.trained.managed import takes_weights
from serving.bundle.scores import INPUT_DTYPES, DenseInput, InputDtype, JaggedInput, JaggedKind, wrong_names

# Samples that a model is followed for, and of a probe.
_FOLLOWED, _PROBED = 7, 64


@dataclass(frozen=True, slots=True)
class FromExample:
    """A model that was followed from an example.

    Attributes:
        signature: what its arguments are made of.
        graph: of its forward.
        collections: of the model.
        undecided: numbers whose key could not be decided, by name, each with the reason.
    """

    signature: Signature
    graph: TracedModel
    collections: Collections
    undecided: Mapping[str, str]

    def cut(self, model: nn.Module) -> tuple[DenseSubgraph, tuple[DenseInput, ...], list[str]]:
        """What follows the collections; its dense inputs; and what of the example requests do not bring, a line each.

        Raises:
            ModelError: it cannot be served, naming the line.
        """
        for node in self.graph.module.graph.nodes:
            if "autocast" in str(node.target):
                raise ModelError(
                    f"{type(model).__name__}: its forward enters autocast: expected `.to(dtype)` of what is to be in "
                    "another dtype; or none, and dense_dtype (--dense-dtype)"
                )
        module, taken, outputs = lower_to_torchscript(model, self.graph, self.signature, self.collections)
        self._expect_looked_up(model, taken)
        paths = [each for each in taken if isinstance(each, str) and each != EMBEDDINGS]
        nodes = (node for node in self.graph.module.graph.nodes if node.op == "placeholder")
        arguments = dict(zip(self.graph.inputs, nodes, strict=True))
        dense = tuple(_dense_input(path, self.signature.by_sample[path], arguments[path]) for path in paths)
        bags, of_ids = self.signature.bags(), self.signature.numbers
        dense += tuple(
            _dense_input(of.name, bags[of.name].ids, arguments[of], of_ids[of.name]) for of in _numbers(taken)
        )
        for wrong in wrong_names([each.name for each in dense], [*outputs]):
            raise ModelError(f"{type(model).__name__}: {wrong}")
        jagged = tuple(each for each in taken if isinstance(each, JaggedInput))

        def answer(of: nn.Module, given: DenseInputs) -> Mapping[str, Tensor]:
            by_sample = {path: self._repeated(path, given.samples) for path in self.signature.by_sample}
            by_sample |= {
                path: numbers.to(self.signature.by_sample[path].dtype)
                for path, numbers in zip(paths, given.dense, strict=True)
            }
            call = self.signature.called(given.samples, given.bags, by_sample)
            found, _ = named_outputs(of, call.answer_of(of), Tensor)
            return {name: found[name].movedim(each.dim, 0) for name, each in outputs.items()}

        by_id = {name: each.key for name, each in outputs.items() if each.key is not None}
        cut = DenseSubgraph(module, tuple(paths), tuple(outputs), answer, jagged, by_id, is_timeless=True)
        return cut, dense, [*self._said(taken, outputs)]

    def _repeated(self, path: str, samples: int) -> Tensor:
        old = self.signature.by_sample[path]
        return old[torch.arange(samples) % self.signature.samples].clone()

    def _expect_looked_up(self, model: nn.Module, taken: tuple[Input, ...]) -> None:
        keys = {key for columns in self.collections.values() for key in columns.keys}
        features = {name for columns in self.collections.values() for name in columns.features}
        weighted = {key for each, columns in self.collections.items() if takes_weights(each) for key in columns.keys}
        for each in (each for each in taken if isinstance(each, JaggedInput)):
            if each.kind is JaggedKind.WEIGHTS and each.name in keys - weighted:
                raise ModelError(
                    f"{type(model).__name__}: uses the weights of {each.name!r}, and the collection that looks it up "
                    "takes none (is_weighted): no request would bring them: give them as the values of a "
                    "JaggedTensor of their own"
                )
            if each.name in keys | features or each.kind is JaggedKind.NUMBERS:
                continue
            if sum(each.name in kjt.keys() for kjt in self.signature.keyed.values()) > 1:  # noqa: SIM118  no mapping
                why = "of several KeyedJaggedTensors: a request brings it once: expected a key of its own in each"
            elif each.kind is JaggedKind.WEIGHTS:
                why = "for its weights, and no collection looks it up: requests bring weights of ids alone"
            elif each.kind is JaggedKind.LENGTHS and ids_of(each.name) not in taken:
                raise ModelError(
                    f"{type(model).__name__}: uses how many numbers {each.name!r} has in each sample, and none of "
                    "these: no request would say it: give it as a tensor [B]"
                )
            else:
                why = (
                    f"which no collection looks up, and {self.undecided.get(each.name, 'it is of no key')}: requests "
                    "bring ids of tables; a number for each id of one key, whose rows the forward puts it beside "
                    "(rows.values() * numbers.values(), or both padded); and tensors of one shape for each sample: "
                    f"give it as one of these, such as a tensor [B, n] that {each.name!r} is padded to before the "
                    "model (to_padded_dense)"
                )
            raise ModelError(f"{type(model).__name__}: uses {each.name!r}, {why}")

    def _said(self, taken: tuple[Input, ...], outputs: Mapping[str, Answer]) -> Iterator[str]:
        signature = self.signature
        places = {each.path for each in signature.placed.values()}
        unused = [path for path in signature.by_sample if path not in taken and path not in places]
        if unused:
            yield f"example: requests do not bring {', '.join(unused)}: no score needs it"
        if signature.constants:
            yield f"example: {', '.join(signature.constants)} stays as it is in the example, for all requests"
        if signature.checks.lines:
            yield f"example: requests are not checked as the forward does{' and'.join(signature.checks.lines)}"
        if left := [*(name for name in self.graph.outputs if name not in outputs), *self.graph.left]:
            yield f"example: the outputs {', '.join(left)} are left out: they have no row for each sample, or id"
        yield from (f"example: {each}" for each in renamed_outputs(outputs))
        for name, answer in outputs.items():
            if answer.dim:
                yield f"example: the output {name} has its rows in dimension {answer.dim}: they come first in answers"
        for each in _numbers(taken):
            key = signature.numbers[each.name]
            yield f"example: {each.name} has a row for each id of {key}, and comes as a dense input"

    def given(self, cut: DenseSubgraph) -> DenseInputs:
        """What the dense part is given for rows of the example, drawn from its samples, with random embeddings.

        Its keys of fixed length are those that the forward makes itself, and those of which the dense part takes any.
        """
        features = keys_of_features(self.collections)
        kept = {*self.signature.placed, *(self.signature.key_of(each, features) for each in cut.jagged)}
        fixed = {key: count for key, count in self.signature.fixed.items() if key in kept}
        return _given(replace(self.signature, fixed=fixed), self.collections, _PROBED, cut.inputs)


def _numbers(taken: Iterable[Input]) -> Iterator[JaggedInput]:
    """The dense inputs with a row for each id of a key, of what a program takes."""
    yield from (each for each in taken if isinstance(each, JaggedInput) and each.kind is JaggedKind.NUMBERS)


def trace_example(model: nn.Module, collections: Collections, example: Example) -> FromExample:
    """Follow a model from one call of it, and see that ids reach its collections unchanged.

    Args:
        model: a copy.
        collections: of the model.
        example: the call.

    Raises:
        ModelError: it cannot be followed, or changes ids; naming the line.
    """
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{type(model).__name__}: {name or 'it'} is TorchScript, which torch.export does not follow: "
                "expected the module that it was made of"
            )
    signature = read_signature(model, collections, example)
    inputs, found = _followed(model, collections, signature)
    owners = _owners(signature, found, collections)
    if owners.keys:
        signature = replace(signature, numbers=owners.keys)
        inputs, found = _followed(model, collections, signature)
    sizes = Sizes(found.module.graph, found.inputs, signature, keys_of_features(collections))
    signature = replace(signature, fixed=sizes.fixed(), first=sizes.first())
    signature = with_shared_lengths(signature, found, inputs, collections)
    signature = locate_ids(model, signature, found, inputs, collections)
    return FromExample(signature, found, collections, owners.undecided)


def _owners(signature: Signature, found: TracedModel, collections: Collections) -> KeysOfInputs:
    """Which keys the numbers are of that no collection looks up. The graph takes lengths of their own."""
    graph, features = found.module.graph, keys_of_features(collections)
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    key_of = {each: signature.key_of(each, features) for each in found.inputs if isinstance(each, JaggedInput)}
    inputs = dict(zip(nodes, found.inputs, strict=True))
    return find_keys_of_inputs(graph, inputs, key_of, signature.unkeyed, signature.parts, signature.bags())


def _followed(
    model: nn.Module, collections: Collections, signature: Signature
) -> tuple[dict[Input, Tensor], TracedModel]:
    """An example of the inputs of a graph, and the graph."""
    inputs = _inputs(signature, collections)
    errors: list[ModelError] = []
    for counts in _counts(signature, collections):
        try:
            return inputs, trace_model(model, collections, signature, inputs, counts)
        except ModelError as error:
            errors.append(error)
    raise ModelError(f"{errors[0]}{_advice_for_flat(signature)}") from errors[0]


def _advice_for_flat(signature: Signature) -> str:
    """What to do about a tensor of the example that seems to have a number for each id of a key; "" without one."""
    counts = {len(bag.ids): key for key, bag in signature.bags().items()}
    for path in signature.constants:
        leaf = signature.call.leaves[path]
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] in counts:
            return (
                f": {path!r} stays as it is in the example: if it has a number for each id of "
                f"{counts[leaf.shape[0]]!r}, give it as a JaggedTensor with the lengths of these"
            )
    return ""


def _counts(signature: Signature, collections: Collections) -> list[dict[str, int]]:
    """Of which keys a forward is followed for as many ids in each sample as the example has: of none; of those whose
    rows it gets; of all."""
    bags = {key: bag for key, bag in signature.bags().items() if key not in signature.unkeyed}
    lengths = {key: {*bag.lengths.tolist()} for key, bag in bags.items()}
    every = {key: int(found.pop()) for key, found in lengths.items() if len(found) == 1 and 0 not in found}
    with_rows = {key for columns in collections.values() if not columns.spans for key in columns.keys}
    of_rows = {key: count for key, count in every.items() if key in with_rows}
    return [{}, *(counts for counts in (of_rows, every if every != of_rows else {}) if counts)]


def _dense_input(path: str, old: Tensor, argument: fx.Node, key: str | None = None) -> DenseInput:
    if old.is_complex():
        raise ModelError(f"{path}: expected real numbers, which requests bring, got {old.dtype}: give both parts")
    if old.dtype is torch.float64 and not torch.equal(large := old[old.abs() > 2**24], large.float().double()):
        raise ModelError(
            f"{path}: has float64 numbers above 2**24, such as {large[0].item()}: requests bring FP32, which rounds "
            "them: give integers, such as whole seconds, or the difference from a number that is near"
        )
    dtype = InputDtype.FP32 if old.dtype in _FLOATS else _integers_of(old.dtype)
    if dtype is None:
        takes = ", ".join(
            str(each).removeprefix("torch.") for each in (*_FLOATS, *INPUT_DTYPES) if each != np.float32
        )
        raise ModelError(f"{path}: expected one of {takes}, got {old.dtype}: give another")
    rows = rows_read_by(argument) if dtype.is_integer else None
    return DenseInput(path, tuple(old.shape[1:]), dtype, rows, key)


# What travels as FP32.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _integers_of(dtype: torch.dtype) -> InputDtype | None:
    """None: there is none, or numpy has no such dtype."""
    with suppress(TypeError):
        return INPUT_DTYPES.get(torch.zeros((), dtype=dtype).numpy().dtype)
    return None


def _inputs(signature: Signature, collections: Collections) -> dict[Input, Tensor]:
    """All that a request may bring, for some rows of the example; embeddings and rows are random."""
    given = _given(signature, collections, _FOLLOWED, tuple(signature.by_sample))
    found: dict[Input, Tensor] = {EMBEDDINGS: given.embeddings}
    found |= dict(zip(signature.by_sample, given.dense, strict=True))
    for key, bag in given.bags.items():
        if key in signature.fixed:
            continue
        if key in signature.numbers:
            found[numbers_of(key)] = bag.ids
        else:
            found |= {ids_of(key): bag.ids, lengths_of(key): bag.lengths}
        if bag.weights is not None:
            found[weights_of(key)] = bag.weights
    return found | {rows_of(name): rows for name, rows in given.rows.items()}


def _given(signature: Signature, collections: Collections, samples: int, dense: tuple[str, ...]) -> DenseInputs:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(signature.samples, (samples,), generator=generator)
    chosen[: signature.samples] = torch.arange(min(samples, signature.samples))
    bags = {key: _followable(bag.at(chosen)) for key, bag in signature.bags().items()}
    width = max((last for columns in collections.values() for _, last in columns.spans), default=0)
    keys, rows = dict[str, str](), dict[str, Tensor]()
    for columns in collections.values():
        if not columns.spans:
            for feature, key, dim in zip(columns.features, columns.keys, columns.dims, strict=True):
                keys[feature] = key
                count = len(bags[key].ids) if key in bags else signature.fixed[key] * samples
                rows[feature] = torch.randn(count, dim, generator=generator)
    return DenseInputs(
        torch.randn(samples, width, generator=generator),
        tuple(signature.by_sample[path][chosen] for path in dense),
        bags,
        rows,
        {**keys, **signature.numbers},
        signature.fixed,
        signature.first,
    )


def _followable(bag: Bag) -> Bag:
    """A bag with two ids or more: torch.export takes 0 and 1 for numbers that never change."""
    if len(bag.ids) > 1:
        return bag
    ids = bag.ids.new_zeros(len(bag.lengths), *bag.ids.shape[1:])
    weights = None if bag.weights is None else torch.ones(len(ids), dtype=bag.weights.dtype)
    return Bag(ids, torch.ones_like(bag.lengths), weights)
