"""What the ranks say to batches."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serving.errors import HostUnavailable, ServingError
from serving.request.tensors import Embeddings
from serving.said import listed, shown

# How many hosts the error of a request names.
_MOST_HOSTS = 3


class Loss(NamedTuple):
    """A host that gave no sums.

    Attributes:
        error: why; it names the host.
        tables: whose rows there are needed.
    """

    error: ServingError
    tables: frozenset[str]


class Answered(NamedTuple):
    """The answer to a batch.

    Attributes:
        embeddings: the features of the batch side by side; float32 or float16 [B, D].
        lost: why requests of the batch got no answer, by their position in it. The others are not affected.
        zeroed: the tables that requests got zeros for, since a host was lost, by their position.
    """

    embeddings: Embeddings
    lost: Mapping[int, Sequence[Loss]] = {}
    zeroed: Mapping[int, frozenset[str]] = {}


def failed_of(answered: Sequence[Answered]) -> dict[int, ServingError]:
    """Requests that got no answer from some of several batches, by their position in all of them.

    The error names the first few of the lost hosts, with the first few of their tables in all batches.
    """
    if not any(each.lost for each in answered):
        return {}
    losses: dict[int, dict[str, Loss]] = {}
    for each in answered:
        for position, lost in each.lost.items():
            kept = losses.setdefault(position, {})
            for error, tables in lost:
                before = kept.get(str(error))
                kept[str(error)] = Loss(error, tables if before is None else before.tables | tables)
    return {position: _error_of([*kept.values()]) for position, kept in losses.items()}


def zeroed_of(answered: Sequence[Answered]) -> dict[str, int]:
    """How many requests got zeros in several batches, by table; those that got no answer do not count."""
    tables: dict[int, frozenset[str]] = {}
    for each in answered:
        for position, zeroed in each.zeroed.items():
            tables[position] = tables.get(position, frozenset()) | zeroed
    failed = {position for each in answered for position in each.lost}
    counts: dict[str, int] = {}
    for position, zeroed in tables.items():
        for table in zeroed if position not in failed else ():
            counts[table] = counts.get(table, 0) + 1
    return counts


def _error_of(losses: Sequence[Loss]) -> ServingError:
    said = [f"tables {listed(map(repr, sorted(tables)))}: {error}" for error, tables in losses[:_MOST_HOSTS]]
    if (more := len(losses) - len(said)) > 0:
        said.append(f"and {more} more hosts")
    return HostUnavailable(shown("; ".join(said)))
