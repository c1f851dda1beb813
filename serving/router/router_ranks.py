"""A bundle with ranks on other hosts: split a batch, ask all hosts at once, and merge their partial sums."""

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.bundle.load import Bundle
from serving.bundle.segments import FeatureShard, segments_by_rank, takes_weights
from serving.errors import ServingError
from serving.lookup.batch_answer import BatchAnswer, LostHost, program_arguments
from serving.lookup.program import load_program
from serving.requests.batches import Batch
from serving.router.calls import HostCallers, HostTime, wait_all
from serving.router.host import TRACE, Host, HostCounts, host_of
from serving.router.hosts_config import HostsConfig, OnShardFailure
from serving.router.messages import PartialRequest, PartialSums
from serving.router.replicas import HostReplicas, LoopThread, check_all, replicas_of
from serving.tables.table_files import TableFiles

# The router's own rank.
_OWN = 0
_KEPT_SELECTIONS = 1024

Results = Mapping[int, PartialSums | ServingError]
# What a rank looks up: rows int64 [n], bag sizes int64 [segments, B], and per-id weights float32 [n] or None.
RankRequest = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Selection:
    """The segments of a rank that a selection of features needs.

    Attributes:
        names: their names, joined by commas, or None for all segments of the rank.
        features: the feature of each segment, as its position in the manifest.
        tables: the table of each segment.
        columns: the columns of the rank's partial sums.
    """

    names: str | None
    features: Sequence[int]
    tables: Sequence[str]
    columns: int


@dataclass(frozen=True, slots=True)
class Split:
    """A batch, split by rank.

    Attributes:
        offsets, features: those of the batch, as `serving.lookup.batch_answer.program_arguments` returns them.
        by_rank: what each rank looks up.
        selections: the segments that each rank looks up.
        to_send: the requests to other hosts, by rank. Hosts whose rows are not needed get none.
    """

    offsets: Tensor
    features: Tensor | None
    by_rank: Sequence[RankRequest]
    selections: Sequence[_Selection]
    to_send: Mapping[int, PartialRequest]


class RouterRanks:
    """A router's program, and the hosts of its plan. Only one thread at a time may call it.

    Args:
        bundle: the router's bundle.
        weights: the weights files of the router's own rank.
        hosts: the addresses of the hosts.
        patience_s: how long to wait for hosts that do not answer yet, in seconds, or None to check no host.

    Attributes:
        loaded_program: the program, and how it runs.
        replicas: the last result of `watch_replicas`.
        host_times: the times of the host calls of the last `answer` that is traced.

    Raises:
        BundleError: the program cannot be loaded.
        ConfigurationError: `hosts` does not fit the bundle, or certificates cannot be used.
        HostUnavailable: a host lacks its bundle, or does not answer. The message names all such hosts.
    """

    def __init__(self, bundle: Bundle, weights: TableFiles, hosts: HostsConfig, patience_s: float | None) -> None:
        manifest = bundle.manifest
        hosts.check(manifest)
        self.loaded_program = load_program(bundle, weights.tensors, methods=("split", "lookup", "merge"))
        self._program = self.loaded_program.program
        self._weights = weights
        self._segments = segments_by_rank(manifest)
        by_host = {bundle.host: bundle for bundle in manifest.hosts}
        self._ranks = {number: by_host[host] for host, number in manifest.plan.rank_of_host.items()}
        self._is_weighted = [takes_weights(manifest, segments) for segments in self._segments]
        self._on_shard_failure = {table.name: hosts.on_shard_failure_of(table.name) for table in manifest.tables}
        self._manifest = manifest
        self._config = hosts
        self.replicas: tuple[HostReplicas, ...] = ()
        self.host_times: list[HostTime] = []
        self._selections: dict[bytes, list[_Selection]] = {}
        self._hosts: dict[int, Host] = {}
        self._loop = LoopThread()
        try:
            self._loop.start(self._connect(patience_s)).result()
            self._callers = HostCallers(self._hosts, self._loop)
        except BaseException:
            self._disconnect()
            raise

    @property
    def counts(self) -> dict[int, HostCounts]:
        """The counts of the calls to each host, by its number."""
        return {self._ranks[rank].host: host.counts for rank, host in self._hosts.items()}

    async def _connect(self, patience_s: float | None) -> None:
        self._hosts = {
            rank: host_of(self._manifest, bundle, self._config.connection(bundle.host))
            for rank, bundle in self._ranks.items()
        }
        if patience_s is not None:
            await check_all(self._hosts, patience_s)

    def watch_replicas(self, period_s: float) -> None:
        """Check every `period_s` seconds which replicas can answer. `replicas` has the last result."""

        async def watch() -> None:
            while True:
                self.replicas = await replicas_of(self._manifest, self._config)
                await asyncio.sleep(period_s)

        self._loop.start(watch())

    def check(self) -> None:
        """Check that every host answers.

        Raises:
            HostUnavailable: a host lacks its bundle, or does not answer. The message names all such hosts.
            ConfigurationError: this process was forked from the one that opened the bundle.
        """
        self._loop.check()
        self._loop.start(check_all(self._hosts, 0.0)).result()

    def close(self) -> None:
        """Close the channels, and end the threads, of which a forked child has none."""
        if self._loop.is_forked:
            return
        self._callers.close()
        self._disconnect()

    def _disconnect(self) -> None:
        async def close() -> None:
            await asyncio.gather(*(host.close() for host in self._hosts.values()))

        self._loop.start(close()).result()
        self._loop.close()

    def answer(self, batches: Sequence[Batch]) -> list[BatchAnswer]:
        """Ask all hosts at once, for all batches. Meanwhile, look up the router's own rank."""
        splits = [self.split(batch) for batch in batches]
        calls = [self._callers.ask(split.to_send) for split in splits]
        if (ahead := self._weights.ahead) is not None:
            for batch in batches:
                ahead.ask(batch)
        local_sums = [self._own_sums(split) for split in splits]
        results = map(wait_all, calls)
        answers = [self._merge(*parts) for parts in zip(batches, splits, local_sums, results, strict=True)]
        if TRACE.get() is not None:  # traces are recorded
            self.host_times = [
                HostTime(self._ranks[rank].host, call.started, call.ended)
                for batch_calls in calls
                for rank, call in batch_calls.items()
            ]
        return answers

    def split(self, batch: Batch) -> Split:
        """Split a batch by rank."""
        values, offsets, weights, features = program_arguments(batch)
        by_rank: list[RankRequest] = self._program.split(values, offsets, weights, features)
        selections = self._selections_of(None if batch.feature_set.default else batch.feature_set.positions)
        to_send = {
            rank: PartialRequest(
                rows=rows.numpy(),
                lengths=lengths.int().numpy().ravel(),
                weights=rank_weights.numpy() if rank_weights is not None and self._is_weighted[rank] else None,
                segments=selections[rank].names,
                samples=lengths.size(1),
                columns=selections[rank].columns,
            )
            for rank, (rows, lengths, rank_weights) in enumerate(by_rank)
            if rank != _OWN and rows.size(0)
        }
        return Split(offsets, features, by_rank, selections, to_send)

    def _selections_of(self, positions: npt.NDArray[np.int64] | None) -> list[_Selection]:
        """The needed segments of each rank. `positions`: of the features in the manifest, or None for all."""
        key = b"" if positions is None else positions.tobytes()
        selections = self._selections.get(key)
        if selections is None:
            if len(self._selections) >= _KEPT_SELECTIONS:
                self._selections.clear()
            features = None if positions is None else set(positions.tolist())
            selections = [_selection_of(segments, features) for segments in self._segments]
            self._selections[key] = selections
        return selections

    def _own_sums(self, split: Split) -> Tensor:
        look_up: Callable[[], Tensor] = partial(self._program.lookup, _OWN, *split.by_rank[_OWN], split.features)
        return look_up() if self._weights.live is None else self._weights.live.state.read(look_up)

    def _merge(self, batch: Batch, split: Split, local_sums: Tensor, results: Results) -> BatchAnswer:
        """The answer to a batch, from the partial sums of all ranks. A lost host's sums are zeros."""
        samples = local_sums.size(0)
        pooled = [local_sums]
        for rank in range(1, len(split.by_rank)):
            sums = results.get(rank)
            if isinstance(sums, np.ndarray):
                pooled.append(_read_only(sums))
            else:
                pooled.append(torch.zeros([samples, split.selections[rank].columns]))
        embeddings = self._program.merge(pooled, split.offsets, split.features).numpy()
        lost = {rank: error for rank, error in results.items() if isinstance(error, ServingError)}
        if not lost:
            return BatchAnswer(embeddings)
        return self._without(batch, split, embeddings, lost)

    def _without(
        self, batch: Batch, split: Split, embeddings: npt.NDArray[Any], lost: Mapping[int, ServingError]
    ) -> BatchAnswer:
        """The answer to a batch, where requests that need rows of lost hosts fail or get zeros."""
        bounds = dict(zip(batch.feature_set.positions.tolist(), batch.bounds, strict=True))
        losses: dict[int, list[LostHost]] = {}
        zeroed: dict[int, frozenset[str]] = {}
        for rank, error in lost.items():
            features = split.selections[rank].features
            ends = np.pad(np.cumsum(split.by_rank[rank][1].numpy(), axis=1), ((0, 0), (1, 0)))
            ends = np.take_along_axis(ends, np.array([bounds[feature] for feature in features]), axis=1)
            needed = np.diff(ends, axis=1) > 0  # bool [segments, requests]
            for request in np.flatnonzero(needed.any(axis=0)).tolist():
                segments = np.flatnonzero(needed[:, request]).tolist()
                tables = frozenset(split.selections[rank].tables[segment] for segment in segments)
                if refused := frozenset(
                    table for table in tables if self._on_shard_failure[table] is OnShardFailure.ERROR
                ):
                    losses.setdefault(request, []).append(LostHost(error, refused))
                zeroed[request] = zeroed.get(request, frozenset()) | tables
        return BatchAnswer(embeddings, losses, zeroed)


def _selection_of(segments: Sequence[FeatureShard], features: set[int] | None) -> _Selection:
    selected = [segment for segment in segments if features is None or segment.feature in features]
    names = None if len(selected) == len(segments) else ",".join(segment.name for segment in selected)
    return _Selection(
        names,
        [segment.feature for segment in selected],
        [segment.shard.table for segment in selected],
        sum(segment.shard.width for segment in selected),
    )


def _read_only(sums: PartialSums) -> Tensor:
    """Partial sums as a float32 tensor. Do not write to it: it may share the memory of a response."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.from_numpy(sums).float()
