"""What scores are made of: a request for them, with what a dense part is given beside it; and where answers are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import Bag, Bags, bags_of
from export.capture.graph_inputs import DenseInputs
from export.capture.stub_collections import Collections, Columns
from export.trained.managed import inner_of, is_sequence
from export.trained.probe import kjt_of, make_probe
from export.trained.tables import Trained
from serving.bundle.manifest import Manifest
from serving.bundle.scores import DenseInput, DensePart, InputDtype
from serving.requests.types import Ids, Tensors

ByFeature = Mapping[str, npt.NDArray[Any]]


def with_embeddings(given: DenseInputs, answer: ByFeature) -> DenseInputs:
    """What is given, with embeddings and rows of an answer to its request, by feature."""
    pooled = [each for name, each in answer.items() if name not in given.keys]
    embeddings = np.concatenate(pooled, axis=1) if pooled else np.zeros((given.samples, 0), np.float32)
    rows = {name: torch.from_numpy(answer[name]) for name in given.rows}
    return replace(given, embeddings=torch.from_numpy(embeddings), rows=rows)


def request_of(manifest: Manifest, bags: Bags) -> Tensors:
    """A request for all keys."""
    own = [bags[key] for key in manifest.keys]
    values = torch.cat([each.ids for each in own]).long().numpy()
    lengths = torch.cat([each.lengths for each in own]).int().numpy()
    if not manifest.weighted:
        return Tensors(None, values, lengths)
    weights = [torch.ones(len(each.ids)) if each.weights is None else each.weights.float() for each in own]
    return Tensors(None, values, lengths, torch.cat(weights).numpy())


def make_dense(inputs: Sequence[DenseInput], samples: int, bags: Bags) -> dict[str, Tensor]:
    """Seeded dense inputs beside `make_probe`, by name: FP32 within [0, 1), the others 0 or 1.

    Args:
        inputs: of a dense part.
        samples: B.
        bags: the ids of the request.
    """
    generator = torch.Generator().manual_seed(0)

    def make(of: DenseInput) -> Tensor:
        shape = (samples if of.key is None else len(bags[of.key].ids), *of.shape)
        if of.dtype is InputDtype.FP32:
            return torch.rand(shape, generator=generator)
        integers = torch.randint(0, 2, shape, generator=generator)
        return torch.from_numpy(integers.numpy().astype(of.dtype.numpy))

    return {each.name: make(each) for each in inputs}


def given_dense(inputs: Sequence[DenseInput], dense: Mapping[str, Tensor], given: DenseInputs) -> DenseInputs:
    """What is given, with dense inputs: those with a row for each sample, and those with one for each id of a key."""
    by_id = {each.name: each.key for each in inputs if each.key is not None}
    numbers = {name: replace(given.bags[key], ids=dense[name], weights=None) for name, key in by_id.items()}
    by_sample = tuple(dense[each.name] for each in inputs if each.key is None)
    return replace(given, dense=by_sample, bags={**given.bags, **numbers}, keys={**given.keys, **by_id})


def probe_request(manifest: Manifest, part: DensePart | None, known: Mapping[str, Ids]) -> Tensors:
    """A request for scores, where no example of a call is known.

    A model that takes ids or rows may take no more ids of a key than it was trained with: there is one in each bag.

    Args:
        manifest: of the bundle.
        part: its dense part; None: of a model whose scores are made of pooled embeddings.
        known: ids of each key with a map.
    """
    if part is None or not part.jagged:
        return make_probe(manifest, known)
    keys = {feature.name: feature.key for feature in manifest.features}
    ones = {part.key_of(each, keys): 1 for each in part.jagged}
    return make_probe(manifest, known, ones | part.fixed_lengths)


def probe_inputs(manifest: Manifest, request: Tensors, part: DensePart | Sequence[DenseInput]) -> DenseInputs:
    """What a dense part is given beside a request, with random embeddings and rows.

    Args:
        manifest: of the bundle.
        request: for all keys.
        part: the dense part; or the dense inputs of one that takes nothing else.
    """
    inputs, fixed = (part.inputs, part.fixed_lengths) if isinstance(part, DensePart) else (part, {})
    together = part.together if isinstance(part, DensePart) else ()
    first = {key: group[0] for group in together for key in group}
    generator = torch.Generator().manual_seed(0)
    samples = request.lengths.size // len(manifest.keys)
    bags = bags_of(kjt_of(manifest, request, torch.device("cpu")))
    width, rows, keys = 0, dict[str, Tensor](), dict[str, str]()
    for feature, table in zip(manifest.features, manifest.feature_tables, strict=True):
        if table.is_sequence:
            keys[feature.name] = feature.key
            rows[feature.name] = torch.randn(len(bags[feature.key].ids), table.dim, generator=generator)
        else:
            width += table.dim
    embeddings = torch.randn(samples, width, generator=generator)
    return given_dense(
        inputs, make_dense(inputs, samples, bags), DenseInputs(embeddings, (), bags, rows, keys, fixed, first)
    )


def collection_columns(trained: Trained, manifest: Manifest) -> dict[nn.Module, Columns]:
    """Where the answers of each collection are in those of the bundle."""
    spans, dims = (
        spans_of(manifest),
        {each.name: table.dim for each, table in zip(manifest.features, manifest.feature_tables, strict=True)},
    )
    found = {}
    for path, own in trained.by_collection.items():
        collection = trained.found.collections[path]
        _, inner = inner_of(collection)
        configs = inner.embedding_configs() if is_sequence(collection) else inner.embedding_bag_configs()
        features = [name for table in own for name in table.features]
        found[collection] = Columns(
            names=[name for each in get_embedding_names_by_table(configs) for name in each],
            features=features,
            keys=[key for table in own for key in table.keys],
            dims=[dims[name] for name in features],
            spans=[] if is_sequence(collection) else [spans[name] for name in features],
        )
    return found


def spans_of(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """The columns of each pooled feature in the embeddings of a request, [first, last)."""
    pooled = [
        (feature.name, table.dim)
        for feature, table in zip(manifest.features, manifest.feature_tables, strict=True)
        if not table.is_sequence
    ]
    ends = np.cumsum([dim for _, dim in pooled]).tolist()
    return {name: (end - dim, end) for (name, dim), end in zip(pooled, ends, strict=True)}


def other_requests(given: DenseInputs, collections: Collections) -> Iterator[tuple[str, DenseInputs]]:
    """Requests and what they are, for messages.

    Args:
        given: of the example.
        collections: that look its ids up.
    """
    generator = torch.Generator().manual_seed(3)
    most = _rows_of(collections)
    bags = {
        key: replace(bag, ids=_random(bag.ids, most[key], generator)) if key in most else bag
        for key, bag in given.bags.items()
    }
    other = replace(given, bags=bags)
    yield "with other ids", other
    for each in (given, other):
        one, few = each.at(torch.tensor([0])), each.at(torch.arange(3))
        yield "of one sample", one
        yield "of one sample without ids", _with_lengths(one, lambda _: [0])
        yield "with one id for each sample", _with_lengths(few, lambda _: [1, 1, 1])
        yield "without ids", _with_lengths(few, lambda _: [0, 0, 0])
        yield (
            "with one id of the first key in all, and more of the others",
            _with_lengths(few, lambda key: [0, key + 1, 0]),
        )
    numbers = (given.bags[name].ids for name in given.numbers)
    if not all(each.is_floating_point() for each in (*given.dense, *numbers)):
        yield "with other integers and booleans", given.with_integers(_shuffled)
        for padding in (0, 1):
            what = f"whose integers and booleans end with {'ones' if padding else 'zeros'}, as padding does"
            yield what, replace(given, dense=tuple(_padded(each, padding) for each in given.dense))


def _shuffled(numbers: Tensor) -> Tensor:
    """Integers and booleans in another order."""
    order = torch.randperm(numbers.numel(), generator=torch.Generator().manual_seed(4))
    return numbers.flatten()[order].view(numbers.shape)


def _padded(numbers: Tensor, padding: int) -> Tensor:
    """Integers and booleans [B, n, …], of which those of each sample are others from some place on, but the first."""
    if numbers.is_floating_point() or numbers.dim() < 2 or (padding and numbers.dtype is not torch.bool):
        return numbers
    samples, count = numbers.shape[:2]
    kept = torch.arange(count) <= (torch.arange(samples) % count).view(-1, 1)
    kept = kept.view(samples, count, *[1] * (numbers.dim() - 2))
    given = torch.full_like(numbers, not padding) if numbers.dtype is torch.bool else numbers
    return torch.where(kept, given, torch.full_like(numbers, padding))


def _with_lengths(given: DenseInputs, lengths_of: Callable[[int], list[int]]) -> DenseInputs:
    """The samples with so many ids of each key, by its number among those whose number of ids is free."""
    bags = dict(given.bags)
    totals = {}
    own = {key: given.key_of(key) for key in given.bags}
    numbers = {
        key: n for n, key in enumerate(key for key in given.bags if own[key] == key and key not in given.fixed)
    }
    for key, number in ((key, numbers[of]) for key, of in own.items() if of in numbers):
        bag, lengths = given.bags[key], lengths_of(number)
        totals[key] = total = sum(lengths)
        first = bag.ids[:1] if len(bag.ids) else bag.ids.new_zeros(1, *bag.ids.shape[1:])
        ids = first.repeat(total, *[1] * (bag.ids.dim() - 1))
        weights = None if bag.weights is None else torch.ones(total, dtype=bag.weights.dtype)
        bags[key] = Bag(ids, torch.tensor(lengths, dtype=bag.lengths.dtype), weights)
    rows = {
        name: torch.ones(totals[given.keys[name]], each.shape[1]) if given.keys[name] in totals else each
        for name, each in given.rows.items()
    }
    return replace(given, bags=bags, rows=rows)


def _rows_of(collections: Collections) -> Mapping[str, int]:
    """The first number that is no row of each key. Raw ids may be any."""
    found: dict[str, int] = {}
    for collection, columns in collections.items():
        inner = inner_of(collection)[1]
        configs = inner.embedding_configs() if is_sequence(collection) else inner.embedding_bag_configs()
        rows = [each.num_embeddings for each in configs for _ in each.feature_names]
        for key, count in zip(columns.keys, rows, strict=True):
            found[key] = min(
                found.get(key, 2**62),
                2**62 if isinstance(collection, BaseManagedCollisionEmbeddingCollection) else count,
            )
    return found


def _random(ids: Tensor, most: int, generator: torch.Generator) -> Tensor:
    most = min(most, torch.iinfo(ids.dtype).max)
    return torch.randint(most, ids.shape, generator=generator, dtype=ids.dtype)
