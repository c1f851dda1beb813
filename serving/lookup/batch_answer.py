"""What ranks take for a batch and answer to it, and the effects of lost hosts on requests."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from serving.errors import HostUnavailable, ServingError, listed, shown
from serving.requests.batches import Batch
from serving.requests.types import Embeddings

# Maximum hosts that the error of a request names.
_MOST_HOSTS = 3


class LostHost(NamedTuple):
    """A host that sent no partial sums for a request.

    Attributes:
        error: the reason. It names the host.
        tables: the tables whose rows on the host the request needs.
    """

    error: ServingError
    tables: frozenset[str]


class BatchAnswer(NamedTuple):
    """The answer to a batch.

    Attributes:
        embeddings: the features of the batch side by side; float32 or float16 [B, D].
        lost: the requests without an answer, by their position in the batch, with the lost hosts that they need.
        zeroed: the requests with zeros in place of a lost host's rows, by their position, with the tables of these
            rows.
    """

    embeddings: Embeddings
    lost: Mapping[int, Sequence[LostHost]] = {}
    zeroed: Mapping[int, frozenset[str]] = {}


def failed_of(answered: Sequence[BatchAnswer]) -> dict[int, ServingError]:
    """The errors of requests without an answer, by their position.

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
    """The number of requests that got zeros for a table, by table. Requests without an answer do not count.

    Args:
        answered: as for `failed_of`.
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


def program_arguments(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The arguments of a program for a batch, which share memory with it.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], per-id weights float32 [N] or None, and the positions of the
        features in the manifest, int64 [F], or None for all features in the manifest's order.
    """
    features = None if batch.feature_set.default else torch.from_numpy(batch.feature_set.positions)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    return torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), weights, features
