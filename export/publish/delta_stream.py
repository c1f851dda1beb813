"""Publish what a training changes while it goes on: the rows that TorchRec's kernels updated since the last delta.

TorchRec has a tracker of its own, `ModelDeltaTracker`. It takes a feature that two tables read for one of them, and
it has the rows of a shard without saying where the shard begins. So rows are noted where they are certain: at the
kernels, each of which knows its shards.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from export.publish.delta import Changed, check_takes, publish_delta
from export.publish.lineage import Lineage, PublishedDelta
from serving.errors import ConfigurationError

# Kernels in which TorchRec trains tables. Those of the first kind update rows themselves, by one of these optimizers
# only the rows that were looked up.
_FUSED = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)
_DENSE = (BatchedDenseEmbedding, BatchedDenseEmbeddingBag)
_BY_ROW = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
)
_T = TypeVar("_T")


@contextmanager
def stream_deltas(
    dmp: DistributedModelParallel,
    repository: Path | str,
    model: str,
    *,
    every_s: float = 10.0,
    version: int | None = None,
    max_error: Mapping[str, float] = MappingProxyType({}),
    deltas: Path | str | None = None,
    signing_key: Path | None = None,
) -> Iterator["DeltaStream"]:
    """In the block, publish about every `every_s` seconds the rows that a training changed, and the rest at its end.

        with stream_deltas(dmp, "model_repository", "ads") as stream:
            for batch in batches:
                loss(dmp(batch)).backward()
                stream.step()

    Every process of the training enters the block, and calls `step` as often. The one with rank 0 publishes, so only
    that one needs the repository. If the block ends by an error, the rest is not published.

    What is published is what changed since the block began, of the tables that the version has. If the model was
    trained after it was exported, call `publish_changes` before. A step of the optimizer is seen, and nothing else,
    such as `load_state_dict`.

    Args:
        dmp: the module that is trained.
        every_s: seconds between two deltas, more than 0. Processes count steps in place of seconds.
        repository, model, version, max_error, deltas, signing_key: as `publish_delta`. The version stays what it is
            when the block begins.

    Yields:
        What to call `step` of.

    Raises:
        ConfigurationError: the module has other tables than the version, or not all of a table is in kernels that
            are known.
        BundleError, PublishError: as `publish_delta`. Also in the block, and at its end.
    """
    if type(dmp) is not DistributedModelParallel or dmp._env.process_group is None or not every_s > 0:
        raise ConfigurationError(
            "expected a DistributedModelParallel in a process group, and every_s, seconds > 0, got "
            f"{type(dmp).__name__} and {every_s}"
        )
    lookups = [lookup for each in dmp.modules() for lookup in getattr(each, "_lookups", ())]  # a list, no ModuleList
    kernels = [each for lookup in lookups for each in lookup.modules() if isinstance(each, _FUSED + _DENSE)]
    group = _Group(dmp._env.process_group)
    shards = {
        each: [_Shard(each, number, group) for number in range(len(each.config.embedding_tables))] for each in kernels
    }
    every = group.gathered([shard.place for each in shards.values() for shard in each if shard.is_mine])
    began, tables = group.of_first(lambda: _checked(Lineage.of(Path(repository), model, version, deltas), every))
    common: dict[str, Any] = {"max_error": max_error, "deltas": deltas, "signing_key": signing_key}
    publish = partial(publish_delta, repository, model, version=began, **common)
    own = [shard for each in shards.values() for shard in each if shard.place.table in tables]
    stream = DeltaStream(group, own, publish, every_s)
    with ExitStack() as hooks:
        for kernel, each in shards.items():
            hooks.callback(kernel.register_forward_hook(partial(_note, each)).remove)
        yield stream
        stream.publish()


class _Place(NamedTuple):
    """Where a shard lies in its table."""

    table: str
    row: int
    column: int
    height: int
    width: int


# Of a shard, rows of the table by their numbers, int64 [n], in order; and what it has of them, float32 [n, width].
_Part = tuple[_Place, npt.NDArray[np.int64], npt.NDArray[np.float32]]


class _Shard:
    """A shard of a table that is trained in this process.

    Args:
        kernel: of TorchRec.
        number: of the shard there.
        group: the processes of the training.

    Attributes:
        place: where it lies.
        is_mine: whether this process publishes it. All have the rows of data-parallel tables, and they are the same.
    """

    def __init__(self, kernel: Any, number: int, group: "_Group") -> None:
        self._kernel, self._number = kernel, number
        table: ShardedEmbeddingTable = kernel.config.embedding_tables[number]
        now = self._rows()
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        self.place = _Place(table.name, row, column, *now.shape)
        self.is_mine = table.local_metadata is not None or group.is_first
        self._is_changed = torch.zeros(len(now), dtype=torch.bool, device=now.device)
        # What the rows were, if others may change than those that are looked up.
        by_row = isinstance(kernel, _FUSED) and kernel.emb_module.optimizer in _BY_ROW
        self._before = None if by_row else now.clone()

    def _rows(self) -> Tensor:
        """Its rows as they are now, [height, width]."""
        rows: Tensor = self._kernel.split_embedding_weights()[self._number]
        return rows.detach()

    def note(self, ids: Tensor) -> None:
        """Rows that change now, by their numbers in the shard."""
        self._is_changed[ids] = True

    def changed(self) -> npt.NDArray[np.int64]:
        """The rows that changed since `forget`, by their numbers in the table."""
        self._kernel.flush()  # rows that a GPU has in a cache
        if self._before is not None:
            self._is_changed = torch.ne(self._rows(), self._before).any(dim=1)
        ids: npt.NDArray[np.int64] = self._is_changed.nonzero().flatten().cpu().numpy()
        return ids + self.place.row

    def part(self, ids: npt.NDArray[np.int64]) -> _Part:
        """What the shard has of some rows of the table."""
        low, high = np.searchsorted(ids, (self.place.row, self.place.row + self.place.height))
        rows = self._rows()
        own = rows[torch.from_numpy(ids[low:high] - self.place.row).to(rows.device)]
        return self.place, ids[low:high], own.float().cpu().numpy()

    def forget(self) -> None:
        """From now on, no row has changed."""
        if self._before is not None:
            self._before.copy_(self._rows())
        self._is_changed.zero_()


class DeltaStream:
    """The deltas of a training that goes on. `stream_deltas` makes it.

    Attributes:
        published: the delta that was published last, in the process with rank 0. None: none was.
    """

    def __init__(
        self,
        group: "_Group",
        shards: Sequence[_Shard],
        publish: Callable[[Mapping[str, Changed]], PublishedDelta],
        every_s: float,
    ) -> None:
        self.published: PublishedDelta | None = None
        self._group, self._shards, self._publish, self._every_s = group, shards, publish, every_s
        # Steps since the last delta, and after how many there is one: all processes publish after the same step,
        # without asking each other at each.
        self._steps, self._every_steps = 0, 1
        self._began = time.monotonic()

    def step(self) -> None:
        """Say that a step of the optimizer is done. About every `every_s` seconds, what changed is published.

        Raises:
            QuantizeError, ParityError, PublishError: as `publish_delta`, in each process. No row is forgotten.
        """
        self._steps += 1
        if self._steps >= self._every_steps:
            self.publish()

    def publish(self) -> None:
        """Publish what changed since the last delta, if anything did. Every process calls it.

        Raises:
            QuantizeError, ParityError, PublishError: as `publish_delta`, in each process. No row is forgotten.
        """
        own = [shard for shard in self._shards if shard.is_mine]
        # A row may have changed in one of its shards alone. All of it is published.
        found = self._group.gathered([(shard.place.table, shard.changed()) for shard in own])
        ids = self._group.of_first(lambda: _joined(found))
        parts = self._group.gathered(
            [shard.part(ids[shard.place.table]) for shard in own if shard.place.table in ids]
        )
        self._every_steps = self._group.of_first(lambda: self._published(parts))
        self._steps = 0
        for shard in self._shards:
            shard.forget()

    def _published(self, parts: Sequence[_Part]) -> int:
        """Publish, and say after how many steps to publish again: as many as `every_s` takes, at most twice as many
        as before."""
        if changed := _whole_rows(parts):
            self.published = self._publish(changed)
        now = time.monotonic()
        step_s, self._began = (now - self._began) / max(self._steps, 1), now
        return max(1, min(2 * self._every_steps, round(self._every_s / step_s)))


def _note(shards: Sequence[_Shard], kernel: Any, inputs: tuple[KeyedJaggedTensor, ...], output: Tensor) -> None:
    """Note the rows of a lookup when its gradient comes, for then they change. A pipeline looks up much earlier."""
    if not output.requires_grad:
        return
    ids, lengths = inputs[0].values(), inputs[0].length_per_key()

    def changing(_: Tensor) -> None:
        for number, own in zip(kernel._feature_table_map, ids.split(lengths), strict=True):
            shards[number].note(own)

    output.register_hook(changing)  # type: ignore[no-untyped-call]


def _checked(lineage: Lineage, places: Sequence[_Place]) -> tuple[int, set[str]]:
    """The version of a lineage, and its tables, if shards have each of them whole and once. They may have others."""
    for table in lineage.bundle.manifest.tables:
        check_takes(table)
        own = [each for each in places if each.table == table.name]
        cells = sum(each.height * each.width for each in own)
        fits = all(each.row + each.height <= table.rows and each.column + each.width <= table.dim for each in own)
        if not fits or cells != table.rows * table.dim:
            raise ConfigurationError(
                f"table {table.name!r} of {lineage.bundle.path}: expected {table.rows} rows of {table.dim} columns, "
                f"each once, in TorchRec's fused or dense kernels, got {cells:,} elements in {len(own)} shards: "
                "export the module anew, or publish by `publish_changes`"
            )
    return int(lineage.bundle.path.name), {table.name for table in lineage.bundle.manifest.tables}


def _joined(found: Sequence[tuple[str, npt.NDArray[np.int64]]]) -> dict[str, npt.NDArray[np.int64]]:
    """The rows that changed in any shard, each once, by table. A table without any is left out."""
    by_table: dict[str, list[npt.NDArray[np.int64]]] = {}
    for table, ids in found:
        if ids.size:
            by_table.setdefault(table, []).append(ids)
    return {table: np.unique(np.concatenate(each)) for table, each in by_table.items()}


def _whole_rows(parts: Sequence[_Part]) -> dict[str, Changed]:
    """The rows of all shards, put together by table."""
    ids = _joined([(place.table, numbers) for place, numbers, _ in parts])
    widths = {
        table: max(place.column + place.width for place, _, _ in parts if place.table == table) for table in ids
    }
    rows = {table: np.empty((each.size, widths[table]), np.float32) for table, each in ids.items()}
    for place, numbers, own in parts:
        if numbers.size:
            at = np.searchsorted(ids[place.table], numbers)
            rows[place.table][at, place.column : place.column + place.width] = own
    return {table: (each, rows[table]) for table, each in ids.items()}


class _Group:
    """The processes of a training."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.is_first = dist.get_rank(group) == 0

    def gathered(self, items: list[_T]) -> list[_T]:
        """The items of all processes, in the one with rank 0."""
        every: list[Any] | None = [None] * dist.get_world_size(self._group) if self.is_first else None
        dist.gather_object(items, every, group=self._group, group_dst=0)
        return [item for each in every or [] for item in each]

    def of_first(self, act: Callable[[], _T]) -> _T:
        """What the process with rank 0 gets by acting. If it fails, all raise that error."""
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, group=self._group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]  # type: ignore[no-any-return]
