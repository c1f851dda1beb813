"""Find out from one call of a model which of its arguments are ids of keys, and which are dense inputs.

In that call the collections only record their arguments, so no row of a table is needed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export.capture.bags import Bag, RequestKjt, bag_of, bags_of, have_same_ids, have_same_lengths
from export.capture.call_signature import Signature, keys_of
from export.capture.example import Call
from export.capture.outside_reads import OutsideReads
from export.capture.stub_collections import Collections, Columns, stubbed, zeros_of
from export.capture.tensor_provenance import KjtParts, TensorProvenance
from export.capture.value_checks import Checks, RecordedChecks
from export.config import Example
from export.errors import ModelError, last_line
from export.trained.eval_mode import evaluating, quiet
from export.trained.source_location import current_line, line_of_error


def read_signature(model: nn.Module, collections: Collections, example: Example) -> Signature:
    """Find the ids of keys and the dense inputs in the arguments of a model.

    Args:
        model: a copy, which is run.
        collections: of the model. Their rows are not read.
        example: the call.

    Raises:
        ModelError: the call fails, or calls no collection; or the ids of a collection are neither in a KJT of the
            example nor in one of its tensors.
    """
    call = Call.of(model, example).with_leaves({})  # a copy: KJTs cache their results
    kjts = {path: leaf for path, leaf in call.leaves.items() if isinstance(leaf, KeyedJaggedTensor)}
    if variable := [path for path, kjt in kjts.items() if kjt.variable_stride_per_key()]:
        raise ModelError(f"{variable[0]}: expected one number of samples for all keys, as in requests, got several")
    run = _run_example(model, collections, call, kjts)
    made_kjts = [kjt for _, kjt in run.lookups if type(kjt) is not RequestKjt]
    parts = _parts_of(model, made_kjts, run.provenance, run.lines)
    _expect_keys_once(model, call, parts, run.lookups)
    paths_of_parts = {path for part in parts for path in part.paths}
    samples = _samples_of(call, run.lookups[0][1], paths_of_parts)
    _expect_one_bag_per_sample(model, run.lookups, samples)
    keys_of_kjts = {key for kjt in kjts.values() for key in keys_of(kjt)}
    jagged = _keys_of_jagged(call, made_kjts, keys_of_kjts)
    weights = _weights_of_keys(call, made_kjts, jagged)
    jagged = {path: key for path, key in jagged.items() if path not in weights}
    keys_of_parts = {key for part in parts for key in part.keys}
    fixed = {
        key: _fixed_length(model, key, bag, samples, run.lines[id(kjt)])
        for kjt in made_kjts
        for key, bag in bags_of(kjt).items()
        if key not in keys_of_kjts and key not in keys_of_parts and key not in jagged.values()
    }
    by_sample = {
        path: leaf
        for path, leaf in call.leaves.items()
        if isinstance(leaf, Tensor) and path not in paths_of_parts and leaf.dim() > 0 and leaf.shape[0] == samples
    }
    _expect_lengths(model, run.provenance, paths_of_parts | by_sample.keys())
    signature = Signature(
        call, samples, kjts, jagged, parts, by_sample, fixed, {}, run.clocks, checks=run.checks, weights=weights
    )
    looked_up = {key for columns in collections.values() for key in columns.keys}
    kjts_of_key = Counter(chain.from_iterable(keys_of(kjt) for kjt in kjts.values()))
    unkeyed = [key for key in signature.bags() if key not in looked_up and key not in fixed and kjts_of_key[key] < 2]
    return replace(signature, unkeyed=unkeyed)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of the forward for the example.

    Attributes:
        lookups: the KJTs that the collections are called with.
        lines: the lines of the model's code that call them, by the id of the KJT.
        provenance: the tensors of the example that other tensors are made of.
        clocks: the lines that read a clock.
        checks: the outcomes of the checks in the model's code.
    """

    lookups: Sequence[tuple[Columns, KeyedJaggedTensor]]
    lines: Mapping[int, str]
    provenance: TensorProvenance
    clocks: Sequence[str]
    checks: Checks


def _run_example(
    model: nn.Module, collections: Collections, call: Call, kjts: Mapping[str, KeyedJaggedTensor]
) -> _Run:
    lookups: list[tuple[Columns, KeyedJaggedTensor]] = []
    lines: dict[int, str] = {}

    def answer(collection: nn.Module, columns: Columns, kjt: KeyedJaggedTensor) -> Any:
        if not isinstance(kjt, KeyedJaggedTensor):
            raise ModelError(f"a collection gets a {type(kjt).__name__}, expected a KeyedJaggedTensor")
        if (count := int(kjt.lengths().sum())) != len(kjt.values()):
            raise ValueError(f"a collection gets {len(kjt.values())} ids, and lengths that add up to {count}")
        lookups.append((columns, kjt))
        lines[id(kjt)] = current_line()
        return zeros_of(collection, columns, kjt)

    def fresh_call() -> Call:
        return call.with_leaves({path: RequestKjt(bags_of(kjt)) for path, kjt in kjts.items()})

    first_call, outside, checks = fresh_call(), OutsideReads(model), Checks()
    tensors = {path: leaf for path, leaf in first_call.leaves.items() if isinstance(leaf, Tensor)}
    provenance = TensorProvenance(tensors)
    with torch.no_grad(), evaluating(model), quiet(), stubbed(collections, answer), _without_rows(collections):
        try:
            with outside.running(), provenance.recording(), RecordedChecks(checks):
                first_call.answer_of(model)
            count = len(lookups)
            if outside.has_draws:
                with outside.running():
                    fresh_call().answer_of(model)
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"{type(model).__name__}: its forward fails for the example{line_of_error(error)}: {last_line(error)}"
            ) from error
    outside.expect_no_draws()
    if not lookups:
        raise ModelError(f"{type(model).__name__}: its forward calls no collection for the example")
    return _Run(lookups[:count], lines, provenance, outside.clocks, checks)


def _parts_of(
    model: nn.Module,
    made_kjts: Sequence[KeyedJaggedTensor],
    provenance: TensorProvenance,
    lines: Mapping[int, str],
) -> list[KjtParts]:
    """The tensors of the example from which the forward makes KJTs and JaggedTensors."""
    for kjt in made_kjts:
        if int(kjt.lengths().sum()) != len(kjt.values()):  # they were equal at the lookup
            raise ModelError(
                f"{type(model).__name__}: its forward changes lengths in place that a collection got"
                f"{lines[id(kjt)]}, which lookups would not see: change them before the model"
            )
    parts = [part for kjt in made_kjts for part in provenance.parts_of(kjt)]
    values = {part.values for part in parts}
    return [*dict.fromkeys((*parts, *(pair for pair in provenance.pairs if pair.values not in values)))]


def _expect_one_bag_per_sample(
    model: nn.Module, lookups: Sequence[tuple[Columns, KeyedJaggedTensor]], samples: int
) -> None:
    for columns, kjt in lookups:
        if columns.spans and kjt.stride() != samples:
            raise ModelError(
                f"{type(model).__name__}: gives a collection {kjt.stride()} bags of each key for {samples} samples "
                "of the example: expected one bag for each sample, since pooled embeddings have a row for each"
            )


def _expect_lengths(model: nn.Module, provenance: TensorProvenance, paths: Collection[str]) -> None:
    """Refuse a JaggedTensor whose values a request would bring without its lengths.

    Args:
        model: for messages.
        provenance: has the JaggedTensors whose lengths are no tensor of the example.
        paths: of values that need no lengths in a request.
    """
    for path, line in provenance.unpaired.items():
        if path not in paths:
            raise ModelError(
                f"{type(model).__name__}: makes a JaggedTensor of {path!r}{line}, and its lengths are no tensor of "
                "the example: put a JaggedTensor into the example, or the lengths as another tensor"
            )


@contextmanager
def _without_rows(collections: Collections) -> Iterator[None]:
    """In the block, tables are an expanded zero, so that a forward that writes to a table changes no row."""
    parameters = [
        (part, name, parameter)
        for collection in collections
        for part in collection.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    for part, name, parameter in parameters:
        expanded = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        part._parameters[name] = nn.Parameter(expanded, requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in parameters:
            part._parameters[name] = parameter


def _expect_keys_once(
    model: nn.Module,
    call: Call,
    parts: Sequence[KjtParts],
    lookups: Sequence[tuple[Columns, KeyedJaggedTensor]],
) -> None:
    """Refuse two KJTs with ids of one key, since a request brings each key once."""
    looked_up = {key for columns, _ in lookups for key in columns.keys}
    keys_by_path = [
        (path, keys_of(leaf)) for path, leaf in call.leaves.items() if isinstance(leaf, KeyedJaggedTensor)
    ]
    keys_by_path += [(part.values, [*part.keys]) for part in parts]
    path_of_key: dict[str, str] = {}
    for path, keys in keys_by_path:
        for key in keys:
            if key in looked_up and key in path_of_key:
                raise ModelError(
                    f"{type(model).__name__}: {path_of_key[key]!r} and {path!r} have ids of one key, {key!r}, and a "
                    "request brings each key once: expected different keys, such as two features of one table: "
                    f"feature_names=[{key!r}, …]"
                )
            path_of_key[key] = path


def _samples_of(call: Call, kjt: KeyedJaggedTensor, paths_of_parts: Collection[str]) -> int:
    """The number of samples in an example, as its KJTs have it.

    A KJT that the forward makes may have a bag for each id instead. Then the number of samples is the largest first
    dimension of a tensor of the example that divides the number of bags.
    """
    kjt_of_example = next((leaf for leaf in call.leaves.values() if isinstance(leaf, KeyedJaggedTensor)), None)
    if kjt_of_example is not None or paths_of_parts:
        return int((kjt_of_example or kjt).stride())
    sizes = [
        leaf.shape[0]
        for leaf in call.leaves.values()
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] and kjt.stride() % leaf.shape[0] == 0
    ]
    return max(sizes, default=int(kjt.stride()))


def _keys_of_jagged(call: Call, made_kjts: Sequence[KeyedJaggedTensor], keys: Collection[str]) -> dict[str, str]:
    """The key of each JaggedTensor of an example, by path: the key with the same ids, or else its path."""
    bags = {key: bag for kjt in made_kjts for key, bag in bags_of(kjt).items()}
    key_of_path: dict[str, str] = {}
    for path, leaf in call.leaves.items():
        if isinstance(leaf, JaggedTensor):
            matching = [
                key
                for key, bag in bags.items()
                if key not in key_of_path.values() and have_same_ids(bag, bag_of(leaf))
            ]
            own_name = f"{path}.values" if path in keys else path
            # If several keys have these ids, the key that the path ends with.
            key_of_path[path] = min(matching, key=lambda key: not path.endswith(key), default=own_name)
    return key_of_path


def _weights_of_keys(call: Call, made_kjts: Sequence[KeyedJaggedTensor], jagged: Mapping[str, str]) -> dict[str, str]:
    """The key whose weights a JaggedTensor of the example has, by path.

    `export.capture.id_provenance` checks in the graph that this holds for every request.
    """
    bags = {key: bag for kjt in made_kjts for key, bag in bags_of(kjt).items()}
    key_of_path: dict[str, str] = {}
    for path in jagged:
        leaf = bag_of(call.leaves[path])
        if leaf.ids.dim() != 1 or not leaf.ids.is_floating_point():
            continue
        for key, bag in bags.items():
            if (
                bag.weights is not None
                and key not in key_of_path.values()
                and have_same_lengths(bag, leaf)
                and torch.equal(bag.weights.float(), leaf.ids.float())
            ):
                key_of_path[path] = key
                break
    return key_of_path


def _fixed_length(model: nn.Module, key: str, bag: Bag, samples: int, line: str) -> int:
    lengths = {*bag.lengths.view(samples, -1).sum(1).tolist()}
    if len(lengths) != 1:
        raise ModelError(
            f"{type(model).__name__}: makes the ids of key {key!r} itself{line}, {min(lengths)} to {max(lengths)} "
            "for a sample of the example: expected the same number for each sample, or a KeyedJaggedTensor, or "
            "values and lengths, in the example: apply masks to padded ids before the model"
        )
    return int(lengths.pop())
