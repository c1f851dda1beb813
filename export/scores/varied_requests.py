"""Variations of an example's request, on which a model and its graph must agree."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import Bag
from export.capture.graph_inputs import DenseInputs
from export.capture.stub_collections import Collections
from export.trained.wrapped_collections import inner_of, is_sequence

# No id reaches it.
_ANY_ID = 2**62


def varied_requests(inputs: DenseInputs, collections: Collections) -> Iterator[tuple[str, DenseInputs]]:
    """Variations of the inputs of a dense part, with a description of each for messages.

    Args:
        inputs: of the example.
        collections: look its ids up.
    """
    generator = torch.Generator().manual_seed(3)
    id_limits = _id_limits(collections)
    bags = {
        key: replace(bag, ids=_random_ids(bag.ids, id_limits[key], generator)) if key in id_limits else bag
        for key, bag in inputs.bags.items()
    }
    with_other_ids = replace(inputs, bags=bags)
    yield "with other ids", with_other_ids
    for request in (inputs, with_other_ids):
        one_sample = request.select(torch.tensor([0]))
        three_samples = request.select(torch.arange(3))
        yield "of one sample", one_sample
        yield "of one sample without ids", _with_lengths(one_sample, lambda _: [0])
        yield "with one id for each sample", _with_lengths(three_samples, lambda _: [1, 1, 1])
        yield "without ids", _with_lengths(three_samples, lambda _: [0, 0, 0])
        yield (
            "with one id of the first key in all, and more of the others",
            _with_lengths(three_samples, lambda key_number: [0, key_number + 1, 0]),
        )
    by_id = (inputs.bags[name].ids for name in inputs.numbers)
    if not all(tensor.is_floating_point() for tensor in (*inputs.dense, *by_id)):
        yield "with other integers and booleans", inputs.with_integers(_shuffled)
        for padding, name in ((0, "zeros"), (1, "ones")):
            yield (
                f"whose integers and booleans end with {name}, as padding does",
                replace(inputs, dense=tuple(_padded(tensor, padding) for tensor in inputs.dense)),
            )


def _shuffled(numbers: Tensor) -> Tensor:
    """Integers and booleans in another order."""
    order = torch.randperm(numbers.numel(), generator=torch.Generator().manual_seed(4))
    return numbers.flatten()[order].view(numbers.shape)


def _padded(tensor: Tensor, padding: int) -> Tensor:
    """Integers and booleans [B, n, …] that end with padding, after one number or more of each sample."""
    if tensor.is_floating_point() or tensor.dim() < 2 or (padding and tensor.dtype is not torch.bool):
        return tensor
    samples, count = tensor.shape[:2]
    is_kept = torch.arange(count) <= (torch.arange(samples) % count).view(-1, 1)
    is_kept = is_kept.view(samples, count, *[1] * (tensor.dim() - 2))
    numbers = torch.full_like(tensor, not padding) if tensor.dtype is torch.bool else tensor
    return torch.where(is_kept, numbers, torch.full_like(tensor, padding))


def _with_lengths(inputs: DenseInputs, lengths_of: Callable[[int], list[int]]) -> DenseInputs:
    """The inputs with other bags.

    Args:
        inputs: of a request.
        lengths_of: the number of ids in each sample, by the number of the key among keys of free lengths.
    """
    leaders = {key: inputs.key_of(key) for key in inputs.bags}
    free_keys = [key for key, leader in leaders.items() if leader == key and key not in inputs.fixed]
    key_numbers = {key: number for number, key in enumerate(free_keys)}
    bags = dict(inputs.bags)
    totals: dict[str, int] = {}
    for key, leader in leaders.items():
        if leader not in key_numbers:
            continue
        bag = inputs.bags[key]
        lengths = lengths_of(key_numbers[leader])
        total = sum(lengths)
        first = bag.ids[:1] if len(bag.ids) else bag.ids.new_zeros(1, *bag.ids.shape[1:])
        ids = first.repeat(total, *[1] * (bag.ids.dim() - 1))
        weights = None if bag.weights is None else torch.ones(total, dtype=bag.weights.dtype)
        bags[key] = Bag(ids, torch.tensor(lengths, dtype=bag.lengths.dtype), weights)
        totals[key] = total
    rows = {
        name: torch.ones(totals[inputs.keys[name]], tensor.shape[1]) if inputs.keys[name] in totals else tensor
        for name, tensor in inputs.rows.items()
    }
    return replace(inputs, bags=bags, rows=rows)


def _id_limits(collections: Collections) -> Mapping[str, int]:
    """The first number that is no row, by key. Raw ids have no limit."""
    limits: dict[str, int] = {}
    for collection, columns in collections.items():
        inner = inner_of(collection)[1]
        configs = inner.embedding_configs() if is_sequence(collection) else inner.embedding_bag_configs()
        rows = [config.num_embeddings for config in configs for _ in config.feature_names]
        is_raw = isinstance(collection, BaseManagedCollisionEmbeddingCollection)
        for key, count in zip(columns.keys, rows, strict=True):
            limits[key] = min(limits.get(key, _ANY_ID), _ANY_ID if is_raw else count)
    return limits


def _random_ids(ids: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    limit = min(limit, torch.iinfo(ids.dtype).max)
    return torch.randint(limit, ids.shape, generator=generator, dtype=ids.dtype)
