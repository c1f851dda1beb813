"""The answers of the ranks to batches, and the ranks that are all in this process.

These make one call of the program for a batch, several for a large one. Ranks on other hosts may be lost: then the
requests that need them get no embeddings.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from serving.bundle.opening import Bundle
from serving.errors import HostUnavailable, ServingError, listed, shown
from serving.lookup.parallel_lookup import ParallelLookup
from serving.lookup.program import load_program, torchscript
from serving.request.tensors import Batch, Embeddings
from serving.tables.table_files import TableFiles

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


class LocalRanks:
    """The program of a bundle over its memory-mapped weights.

    Args:
        bundle: one whose ranks are all on this host.
        weights: its weights files.
        threads: how many threads look up a large batch, the calling one included.

    Attributes:
        forward: of the frozen program. It takes `arguments(batch)`.

    Raises:
        BundleError: the program cannot be loaded.
        EnvironmentMismatch: torch and FBGEMM do not work together.
    """

    def __init__(self, bundle: Bundle, weights: TableFiles, threads: int = 1) -> None:
        program = load_program(bundle)
        program.weights_host = weights.tensors
        self._weights = weights
        # Freezing folds constants. `forward` avoids the hooks of nn.Module.__call__: a third of a small lookup.
        with torchscript():
            self.forward = torch.jit.freeze(program.eval()).forward
        self._pieces = ParallelLookup(program, bundle.manifest, threads) if threads > 1 else None

    def answer(self, batches: Sequence[Batch]) -> list[BatchAnswer]:
        """Look up each batch: one TBE call for each rank. For a large batch, several threads make several."""
        if (ahead := self._weights.ahead) is not None:
            for batch in batches:
                ahead.ask(batch)
        return [BatchAnswer(self._answer(batch)) for batch in batches]

    def _answer(self, batch: Batch) -> Embeddings:
        if (live := self._weights.live) is not None:
            return live.state.read(partial(self._look_up, batch))
        return self._look_up(batch)

    def _look_up(self, batch: Batch) -> Embeddings:
        pooled = None if self._pieces is None else self._pieces.answer(batch)
        return self.forward(*arguments(batch)).numpy() if pooled is None else pooled

    def check(self) -> None:
        """Do nothing: there are no hosts that could fail."""

    def close(self) -> None:
        """End the threads, if there are any. Batches are still answered, on the calling thread."""
        if self._pieces is not None:
            self._pieces.close()


def arguments(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The arguments of a program for a batch. They share memory with it.

    Returns:
        values int64 [N], offsets int64 [F·B + 1], per-id weights float32 [N] or None, and features int64 [F]: their
        positions in the manifest. None for features means the manifest's order, which is compiled in.
    """
    features = None if batch.selection.default else torch.from_numpy(batch.selection.positions)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    return torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), weights, features
