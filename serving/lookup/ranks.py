"""The answers of ranks to batches, and what requests lack where a host is lost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from serving.errors import HostUnavailable, ServingError, listed, shown
from serving.requests.batches import Batch
from serving.requests.types import Embeddings

# Most hosts that the error of a request names.
_MOST_HOSTS = 3


class LostHost(NamedTuple):
    """A host that sent no partial sums for a request.

    Attributes:
        error: why. It names the host.
        tables: the tables of which the request needs rows that the host holds.
    """

    error: ServingError
    tables: frozenset[str]


class BatchAnswer(NamedTuple):
    """The answer to a batch.

    Attributes:
        embeddings: the features of the batch side by side; float32 or float16 [B, D].
        lost: the requests that got no answer, by their position in the batch, each with the hosts that it lacks.
        zeroed: the requests that lack rows of a lost host, by their position, each with the tables of those rows.
            They have zeros in place of them.
    """

    embeddings: Embeddings
    lost: Mapping[int, Sequence[LostHost]] = {}
    zeroed: Mapping[int, frozenset[str]] = {}


def failed_of(answered: Sequence[BatchAnswer]) -> dict[int, ServingError]:
    """The errors of requests that lack an answer, by their position.

    Args:
        answered: batches of the same requests, each for some of their features.

    Returns:
        Errors that name the first few lost hosts, with the first few tables of each in all batches.
    """
    if not any(answer.lost for answer in answered):
        return {}
    losses: dict[int, dict[str, LostHost]] = {}
    for answer in answered:
        for position, lost in answer.lost.items():
            lost_hosts = losses.setdefault(position, {})
            for error, tables in lost:
                before = lost_hosts.get(str(error))
                lost_hosts[str(error)] = LostHost(error, tables if before is None else before.tables | tables)
    return {position: _error_of([*lost_hosts.values()]) for position, lost_hosts in losses.items()}


def zeroed_of(answered: Sequence[BatchAnswer]) -> dict[str, int]:
    """How many requests got zeros for a table, by table. Requests that got no answer do not count.

    Args:
        answered: as in `failed_of`.
    """
    tables: dict[int, frozenset[str]] = {}
    for answer in answered:
        for position, zeroed in answer.zeroed.items():
            tables[position] = tables.get(position, frozenset()) | zeroed
    failed = {position for answer in answered for position in answer.lost}
    counts: dict[str, int] = {}
    for position, zeroed in tables.items():
        for table in zeroed if position not in failed else ():
            counts[table] = counts.get(table, 0) + 1
    return counts


def _error_of(losses: Sequence[LostHost]) -> ServingError:
    messages = [f"tables {listed(map(repr, sorted(tables)))}: {error}" for error, tables in losses[:_MOST_HOSTS]]
    if (more := len(losses) - len(messages)) > 0:
        messages.append(f"and {more} more hosts")
    return HostUnavailable(shown("; ".join(messages)))


def arguments(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The arguments of a program for a batch. They share memory with it.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], per-id weights float32 [N] or None, and features int64 [F]: their
        positions in the manifest. None for features means the manifest's order, which is compiled in.
    """
    features = None if batch.feature_set.default else torch.from_numpy(batch.feature_set.positions)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    return torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), weights, features
