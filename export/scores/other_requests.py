"""Requests that an example is not: of one sample, without ids, with other ids. A graph may have another way for them.

torch.export takes 0 and 1 for sizes that never come, and follows a forward for numbers that it was given alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.answering import Collections
from export.capture.bags import Bag
from export.capture.given import Given
from export.trained.managed import inner_of, is_sequence


def other_requests(given: Given, collections: Collections) -> Iterator[tuple[str, Given]]:
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
        one = each.at(torch.tensor([0]))
        yield "of one sample", one
        yield "of one sample without ids", _with_lengths(one, 0)
        yield "with one id for each sample", _with_lengths(each.at(torch.arange(3)), 1)
        yield "without ids", _with_lengths(each.at(torch.arange(3)), 0)


def _with_lengths(given: Given, count: int) -> Given:
    """The samples with so many ids of each key, where their number is not fixed."""
    bags = dict(given.bags)
    for key, bag in given.bags.items():
        if key not in given.fixed:
            total = count * given.samples
            ids = torch.zeros(total, dtype=bag.ids.dtype) if not len(bag.ids) else bag.ids[:1].repeat(total)
            weights = None if bag.weights is None else torch.ones(total, dtype=bag.weights.dtype)
            bags[key] = Bag(ids, torch.full_like(bag.lengths, count), weights)
    rows = {
        name: each if given.keys[name] in given.fixed else torch.ones(count * given.samples, each.shape[1])
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
