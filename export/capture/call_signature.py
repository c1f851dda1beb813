"""What the arguments of a model are made of: the keys of a request, dense inputs, and what stays as in the example.

It is read off one call, in which the collections only note what they are called with: no row is needed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export.capture.bags import Bag, Bags, RequestKjt, are_equal, as_in, bag_of, bags_of, have_as_many, kjt_of_bags
from export.capture.example import Call
from export.capture.outside_reads import OutsideReads
from export.capture.stub_collections import Collections, Columns, stubbed, zeros_of
from export.capture.tensor_provenance import Parts, TensorProvenance
from export.capture.value_checks import Checks, RecordedChecks
from export.config import Example
from export.errors import ModelError, last_line
from export.trained.running import evaluating, quiet
from export.trained.source_location import current_line, line_of_error
from serving.bundle.scores import JaggedInput, JaggedKind


@dataclass(frozen=True, slots=True)
class Places:
    """Where the ids of a key are in a tensor of the example with a row for each sample: numbers within a row."""

    path: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What the arguments of a model are made of.

    Attributes:
        call, samples: the example, and how many samples it has.
        keyed: the KJTs in it, by path.
        jagged: the JaggedTensors in it: the key of each, by path. One that no collection gets has its path for a key.
        parts: the KJTs that the forward makes of their parts.
        by_sample: the tensors with a row for each sample, by path.
        fixed: the keys that the forward makes of such tensors itself, with the number of ids in each of their bags.
        placed: where the ids of each of these are. Empty until it was followed.
        clocks: the lines of the model's code that read one.
        unkeyed: keys and JaggedTensors that no collection looks up. A key of several KJTs is not among them.
        numbers: of these, those that have a number for each id of a key; that key. Empty until it was followed.
        first: of keys that have as many ids in each sample as another, that one. Empty until it was followed.
        checks: what those of the model's code were answered.
        weights: the JaggedTensors in the example that have the weights of a key, by path; that key.
    """

    call: Call
    samples: int
    keyed: Mapping[str, KeyedJaggedTensor]
    jagged: Mapping[str, str]
    parts: Sequence[Parts]
    by_sample: Mapping[str, Tensor]
    fixed: Mapping[str, int]
    placed: Mapping[str, Places]
    clocks: Sequence[str]
    unkeyed: Sequence[str] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    checks: Checks = field(default_factory=Checks)
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def constants(self) -> list[str]:
        """The leaves that stay as in the example."""
        parts = (path for each in self.parts for path in each.paths)
        taken = {*self.keyed, *self.jagged, *self.weights, *self.by_sample, *parts}
        return [path for path in self.call.leaves if path not in taken]

    def key_of(self, jagged: JaggedInput, keys: Mapping[str, str]) -> str:
        """The key whose ids a jagged input is made of. `keys`: that of each feature."""
        if jagged.kind is JaggedKind.ROWS:
            return keys[jagged.name]
        return self.numbers.get(jagged.name, jagged.name)

    def bags(self) -> dict[str, Bag]:
        """The ids of the example, by key, and numbers of ids."""
        found: dict[str, Bag] = {}
        for kjt in self.keyed.values():
            found |= bags_of(kjt)
        found |= {key: bag_of(self.call.leaves[path]) for path, key in self.jagged.items()}
        for each in self.parts:
            values, lengths = self.call.leaves[each.values], each.lengths_in(self.call.leaves)
            weights = None if each.weights is None else self.call.leaves[each.weights]
            found |= bags_of(KeyedJaggedTensor(list(each.keys), values, weights, lengths))
        for path, key in self.weights.items():
            found[key] = replace(found[key], weights=self.call.leaves[path].values())
        for key, place in self.placed.items():
            ids = self.by_sample[place.path].reshape(self.samples, -1)[:, list(place.places)]
            found[key] = Bag(ids.reshape(-1), torch.full((self.samples,), len(place.places)))
        return found

    def called(self, samples: int, bags: Bags, by_sample: Mapping[str, Tensor], *, known: bool = False) -> Call:
        """The call of the model with other ids and dense inputs.

        Args:
            samples: B.
            bags: ids by key. A key that is not there has none.
            by_sample: tensors with a row for each sample, by path.
            known: whether KJTs are to know where their ids come from.
        """
        leaves: dict[str, Any] = {path: each for path, each in by_sample.items() if path in self.by_sample}
        for path, kjt in self.keyed.items():
            taken = {key: as_in(kjt, bags.get(key), samples) for key in _keys(kjt)}
            leaves[path] = RequestKjt(taken) if known else kjt_of_bags(taken)
        for path, key in self.jagged.items():
            bag = as_in(self.call.leaves[path], bags.get(key), samples)
            leaves[path] = JaggedTensor(bag.ids, weights=bag.weights, lengths=bag.lengths)
        for path, key in self.weights.items():
            old, bag = self.call.leaves[path], bags[key]
            assert bag.weights is not None  # noqa: S101  they are those of the request
            leaves[path] = JaggedTensor(
                bag.weights.to(old.values().dtype), lengths=bag.lengths.to(old.lengths().dtype)
            )
        for each in self.parts:
            of_key = [bags[key] for key in each.keys]
            values = torch.cat([bag.ids for bag in of_key])
            leaves[each.values] = values.to(self.call.leaves[each.values].dtype)
            # Of keys that have the lengths of one tensor, the first one's.
            leaves.setdefault(
                each.lengths, each.as_in(self.call.leaves[each.lengths], [bag.lengths for bag in of_key])
            )
            if each.weights is not None:
                leaves[each.weights] = torch.cat([bag.weights for bag in of_key if bag.weights is not None])
        for path in {each.path for each in self.placed.values()}:
            leaves[path] = self.tensor_of(path, bags)
        return self.call.with_leaves(leaves)

    def tensor_of(self, path: str, bags: Bags) -> Tensor:
        """The tensor of the example at `path`, made of the ids of the keys that are taken from it; else zeros."""
        old = self.by_sample[path]
        taken = {key: each.places for key, each in self.placed.items() if each.path == path}
        columns = [bags[key].ids.view(-1, len(places)) for key, places in taken.items()]
        found = {place: number for number, place in enumerate(place for each in taken.values() for place in each)}
        width = old[:1].numel()
        if len(found) < width:
            columns.append(torch.zeros_like(columns[0][:, :1]))
        every = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
        order = [found.get(place, len(found)) for place in range(width)]
        if order != list(range(len(found))):
            every = every[:, order]
        return every.to(old.dtype).view(-1, *old.shape[1:])


def _keys(kjt: KeyedJaggedTensor) -> list[str]:
    found: list[str] = kjt.keys()
    return found


def read_signature(model: nn.Module, collections: Collections, example: Example) -> Signature:
    """Read what the arguments of a model are made of, off one call.

    Args:
        model: a copy, which is run.
        collections: of the model. No row of them is read.
        example: the call.

    Raises:
        ModelError: the call fails, or calls no collection; or a collection gets ids that are neither those of a KJT
            of the example, nor taken from one of its tensors.
    """
    call = Call.of(model, example).with_leaves({})  # what is asked of a KJT, it keeps
    kjts = {path: each for path, each in call.leaves.items() if isinstance(each, KeyedJaggedTensor)}
    if several := [path for path, each in kjts.items() if each.variable_stride_per_key()]:
        raise ModelError(
            f"{several[0]}: expected as many samples for each key, as requests have, got several numbers"
        )
    run = _run_of_example(model, collections, call, kjts)
    heard, origins, lines = run.heard, run.origins, run.lines
    made = [each for _, each in heard if type(each) is not RequestKjt]
    parts = _parts_of(model, made, origins, lines)
    _expect_keys_once(model, call, parts, heard)
    taken = {path for each in parts for path in each.paths}
    samples = _samples_of(call, heard[0][1], taken)
    _expect_bags(model, heard, samples)
    jagged = _keys_of_jagged(call, made, {key for each in kjts.values() for key in _keys(each)})
    weights = _weights_of_keys(call, made, jagged)
    jagged = {path: key for path, key in jagged.items() if path not in weights}
    known = {key for each in kjts.values() for key in _keys(each)} | {key for each in parts for key in each.keys}
    fixed = {
        key: _fixed_length(model, key, bag, samples, lines[id(each)])
        for each in made
        for key, bag in bags_of(each).items()
        if key not in known and key not in jagged.values()
    }
    by_sample = {
        path: each
        for path, each in call.leaves.items()
        if isinstance(each, Tensor) and path not in taken and each.dim() > 0 and each.shape[0] == samples
    }
    _expect_paired(model, origins, taken | by_sample.keys())
    read = Signature(
        call, samples, kjts, jagged, parts, by_sample, fixed, {}, run.clocks, checks=run.checks, weights=weights
    )
    looked_up = {key for columns in collections.values() for key in columns.keys}
    places = Counter(chain.from_iterable(_keys(each) for each in kjts.values()))
    unkeyed = [key for key in read.bags() if key not in looked_up and key not in fixed and places[key] < 2]
    return replace(read, unkeyed=unkeyed)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a forward for its example.

    Attributes:
        heard: what its collections are called with.
        lines: of the model's code that call them, by the id of the KJT.
        origins: which tensors of the example others are made of.
        clocks: the lines that read one.
        checks: what those of the model's code were answered.
    """

    heard: Sequence[tuple[Columns, KeyedJaggedTensor]]
    lines: Mapping[int, str]
    origins: TensorProvenance
    clocks: Sequence[str]
    checks: Checks


def _run_of_example(
    model: nn.Module, collections: Collections, call: Call, kjts: Mapping[str, KeyedJaggedTensor]
) -> _Run:
    heard: list[tuple[Columns, KeyedJaggedTensor]] = []
    lines: dict[int, str] = {}

    def answer(collection: nn.Module, columns: Columns, given: KeyedJaggedTensor) -> Any:
        if not isinstance(given, KeyedJaggedTensor):
            raise ModelError(f"a collection gets a {type(given).__name__}, expected a KeyedJaggedTensor")
        if (count := int(given.lengths().sum())) != len(given.values()):
            raise ValueError(f"a collection gets {len(given.values())} ids, and lengths that add up to {count}")
        heard.append((columns, given))
        lines[id(given)] = current_line()
        return zeros_of(collection, columns, given)

    def called() -> Call:
        return call.with_leaves({path: RequestKjt(bags_of(each)) for path, each in kjts.items()})

    given, outside, checks = called(), OutsideReads(model), Checks()
    origins = TensorProvenance({path: each for path, each in given.leaves.items() if isinstance(each, Tensor)})
    with torch.no_grad(), evaluating(model), quiet(), stubbed(collections, answer), _without_rows(collections):
        try:
            with outside.running(), origins.noted(), RecordedChecks(checks):
                given.answer_of(model)
            count = len(heard)
            if outside.has_draws:
                with outside.running():
                    called().answer_of(model)
        except Exception as error:  # the user's code may raise anything
            raise ModelError(
                f"{type(model).__name__}: its forward fails for the example{line_of_error(error)}: {last_line(error)}"
            ) from error
    outside.expect_no_draws()
    if not heard:
        raise ModelError(f"{type(model).__name__}: its forward calls no collection for the example")
    return _Run(heard[:count], lines, origins, outside.clocks, checks)


def _parts_of(
    model: nn.Module, made: Sequence[KeyedJaggedTensor], origins: TensorProvenance, lines: Mapping[int, str]
) -> list[Parts]:
    """The tensors of the example that KJTs and JaggedTensors are made of."""
    for each in made:
        if int(each.lengths().sum()) != len(each.values()):  # they were the same when it was looked up
            raise ModelError(
                f"{type(model).__name__}: its forward changes lengths in place that a collection got"
                f"{lines[id(each)]}: lookups would not see it: do it before the model"
            )
    parts = [part for each in made for part in origins.parts_of(each)]
    values = {each.values for each in parts}
    return [*dict.fromkeys((*parts, *(pair for pair in origins.pairs if pair.values not in values)))]


def _expect_bags(model: nn.Module, heard: Sequence[tuple[Columns, KeyedJaggedTensor]], samples: int) -> None:
    for columns, each in heard:
        if columns.spans and each.stride() != samples:
            raise ModelError(
                f"{type(model).__name__}: gives a collection {each.stride()} bags of each key for {samples} samples "
                "of the example: expected one for each: pooled embeddings have a row for each sample"
            )


def _expect_paired(model: nn.Module, origins: TensorProvenance, brought: Collection[str]) -> None:
    for path, line in origins.unpaired.items():
        if path not in brought:
            raise ModelError(
                f"{type(model).__name__}: makes a JaggedTensor of {path!r}{line}, and its lengths are no tensor of "
                "the example: give it as a JaggedTensor, or its lengths as a tensor beside it"
            )


@contextmanager
def _without_rows(collections: Collections) -> Iterator[None]:
    """In the block, tables have one number in place of all: a forward that writes to one must not reach them."""
    parts = [part for collection in collections for part in collection.modules()]
    kept = [(part, name, each) for part in parts for name, each in part._parameters.items() if each is not None]
    for part, name, each in kept:
        alike = torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape)
        part._parameters[name] = nn.Parameter(alike, requires_grad=False)
    try:
        yield
    finally:
        for part, name, each in kept:
            part._parameters[name] = each


def _expect_keys_once(
    model: nn.Module, call: Call, parts: Sequence[Parts], heard: Sequence[tuple[Columns, KeyedJaggedTensor]]
) -> None:
    """Refuse two KJTs that have ids of one key: a request brings each key once."""
    read = {key for columns, _ in heard for key in columns.keys}
    given = [(path, _keys(leaf)) for path, leaf in call.leaves.items() if isinstance(leaf, KeyedJaggedTensor)]
    found: dict[str, str] = {}
    for path, keys in (*given, *((each.values, each.keys) for each in parts)):
        for key in keys:
            if key in read and key in found:
                raise ModelError(
                    f"{type(model).__name__}: {found[key]!r} and {path!r} have ids of one key, {key!r}, and a "
                    "request brings each key once: expected a feature of its own for each, such as "
                    f"feature_names=[{key!r}, …] of one table"
                )
            found[key] = path


def _samples_of(call: Call, kjt: KeyedJaggedTensor, parts: Collection[str]) -> int:
    """The samples of an example: those of its KJTs. One that the forward made may have a bag for each id instead."""
    given = next((each for each in call.leaves.values() if isinstance(each, KeyedJaggedTensor)), None)
    if given is not None or parts:
        return int((given or kjt).stride())
    sizes = [
        each.shape[0]
        for each in call.leaves.values()
        if isinstance(each, Tensor) and each.dim() > 0 and each.shape[0] and kjt.stride() % each.shape[0] == 0
    ]
    return max(sizes, default=int(kjt.stride()))


def _keys_of_jagged(call: Call, made: Sequence[KeyedJaggedTensor], keys: Collection[str]) -> dict[str, str]:
    """For each JaggedTensor of an example, by path, the key that has its ids; its path where none has."""
    bags = {key: bag for each in made for key, bag in bags_of(each).items()}
    found: dict[str, str] = {}
    for path, leaf in call.leaves.items():
        if isinstance(leaf, JaggedTensor):
            same = [key for key, bag in bags.items() if key not in found.values() and are_equal(bag, bag_of(leaf))]
            # Of several keys with these ids, the one that it is called by.
            own = f"{path}.values" if path in keys else path
            found[path] = min(same, key=lambda key: not path.endswith(key), default=own)
    return found


def _weights_of_keys(call: Call, made: Sequence[KeyedJaggedTensor], jagged: Mapping[str, str]) -> dict[str, str]:
    """The JaggedTensors of an example that have the weights of a key which a collection gets, by path, and that key.

    Whether they are these for any request, the graph says (export/capture/id_provenance.py).
    """
    bags = {key: bag for each in made for key, bag in bags_of(each).items() if bag.weights is not None}
    found: dict[str, str] = {}
    for path in jagged:
        leaf = bag_of(call.leaves[path])
        if leaf.ids.dim() == 1 and leaf.ids.is_floating_point():
            same = (
                key
                for key, bag in bags.items()
                if bag.weights is not None
                and key not in found.values()
                and have_as_many(bag, leaf)
                and torch.equal(bag.weights.float(), leaf.ids.float())
            )
            if (key := next(same, None)) is not None:
                found[path] = key
    return found


def _fixed_length(model: nn.Module, key: str, bag: Bag, samples: int, line: str) -> int:
    lengths = {*bag.lengths.view(samples, -1).sum(1).tolist()}
    if len(lengths) != 1:
        raise ModelError(
            f"{type(model).__name__}: makes the ids of key {key!r} itself{line}, {min(lengths)} to {max(lengths)} "
            "for a sample of the example: expected as many for each sample, or in the example its KeyedJaggedTensor, "
            "or values and lengths: apply masks to padded ids before the model"
        )
    return int(lengths.pop())
