"""Publish deltas of a running training: the rows that TorchRec's kernels updated since the last delta.

TorchRec's own tracker, `ModelDeltaTracker`, assigns a feature that two tables read to one of them, and does not say
where a shard's rows begin. So changed rows are recorded at the kernels, each of which knows its shards.
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

# Kernels in which TorchRec trains tables. Fused kernels update rows themselves. With an optimizer of _BY_ROW, they
# update only the rows that were looked up.
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
    """Publish the rows that a training changed, about every `every_s` seconds and when the block ends.

        with stream_deltas(dmp, "model_repository", "ads") as stream:
            for batch in batches:
                loss(dmp(batch)).backward()
                stream.step()

    Every process of the training enters the block, and calls `step` after each of its steps. The process with rank 0
    publishes, and is the only one that needs the repository. If the block raises an error, changes since the last
    delta are not published.

    The stream publishes rows of the version's tables that optimizer steps change in the block. Call `publish_changes`
    first if the model was trained after its export, and after other changes, such as by `load_state_dict`.

    Args:
        dmp: the module that is trained.
        every_s: seconds between two deltas, more than 0. Processes convert them to a number of steps.
        repository, model, version, max_error, deltas, signing_key: as `publish_delta`. Without `version`, the newest
            version when the block begins.

    Yields:
        The stream, whose `step` the training calls.

    Raises:
        ConfigurationError: the module lacks a table of the version, or a part of a table is in an unknown kernel.
        BundleError, PublishError: as `publish_delta`. Also in the block, and at its end.
    """
    if type(dmp) is not DistributedModelParallel or dmp._env.process_group is None or not every_s > 0:
        raise ConfigurationError(
            "expected a DistributedModelParallel in a process group, and every_s, seconds > 0, got "
            f"{type(dmp).__name__} and {every_s}"
        )
    # `_lookups` is a list, not a ModuleList: `modules()` does not visit it.
    lookups = [lookup for part in dmp.modules() for lookup in getattr(part, "_lookups", ())]
    kernels = [part for lookup in lookups for part in lookup.modules() if isinstance(part, _FUSED + _DENSE)]
    group = _Group(dmp._env.process_group)
    shards = {
        kernel: [_Shard(kernel, index, group) for index in range(len(kernel.config.embedding_tables))]
        for kernel in kernels
    }
    all_shards = [shard for of_kernel in shards.values() for shard in of_kernel]
    blocks = group.gathered([shard.block for shard in all_shards if shard.is_published_here])
    lineage_version, tables = group.of_first(
        lambda: _check_tables(Lineage.of(Path(repository), model, version, deltas), blocks)
    )
    options: dict[str, Any] = {"max_error": max_error, "deltas": deltas, "signing_key": signing_key}
    publish = partial(publish_delta, repository, model, version=lineage_version, **options)
    stream = DeltaStream(group, [shard for shard in all_shards if shard.block.table in tables], publish, every_s)
    with ExitStack() as hooks:
        for kernel, of_kernel in shards.items():
            hooks.callback(kernel.register_forward_hook(partial(_mark_looked_up, of_kernel)).remove)
        yield stream
        stream.publish()


class _Block(NamedTuple):
    """The block of a table that a shard has: its first row and column, and its size."""

    table: str
    row: int
    column: int
    rows: int
    columns: int


# A shard's block, numbers of rows of the table, int64 [n], sorted, and their values, float32 [n, block.columns].
_Part = tuple[_Block, npt.NDArray[np.int64], npt.NDArray[np.float32]]


class _Shard:
    """A shard of a table that is trained in this process.

    Args:
        kernel: TorchRec's kernel.
        index: the shard's index in the kernel.
        group: the processes of the training.

    Attributes:
        block: the shard's block of the table.
        is_published_here: whether this process publishes it. Of a data-parallel table, only one process does.
    """

    def __init__(self, kernel: Any, index: int, group: "_Group") -> None:
        self._kernel, self._index = kernel, index
        table: ShardedEmbeddingTable = kernel.config.embedding_tables[index]
        rows = self._rows()
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        self.block = _Block(table.name, row, column, *rows.shape)
        self.is_published_here = table.local_metadata is not None or group.is_first
        self._is_changed = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        # A copy of the rows at the last delta, if a step may change rows that it did not look up.
        by_row = isinstance(kernel, _FUSED) and kernel.emb_module.optimizer in _BY_ROW
        self._before = None if by_row else rows.clone()

    def _rows(self) -> Tensor:
        """Its current rows, [block.rows, block.columns]."""
        rows: Tensor = self._kernel.split_embedding_weights()[self._index]
        return rows.detach()

    def mark_changed(self, ids: Tensor) -> None:
        """Record that rows change, by their numbers in the shard."""
        self._is_changed[ids] = True

    def changed(self) -> npt.NDArray[np.int64]:
        """The numbers in the table of the rows that changed since `reset`."""
        self._kernel.flush()  # writes rows in a GPU's cache back
        if self._before is not None:
            self._is_changed = torch.ne(self._rows(), self._before).any(dim=1)
        ids: npt.NDArray[np.int64] = self._is_changed.nonzero().flatten().cpu().numpy()
        return ids + self.block.row

    def part(self, ids: npt.NDArray[np.int64]) -> _Part:
        """The shard's part of some rows of the table."""
        low, high = np.searchsorted(ids, (self.block.row, self.block.row + self.block.rows))
        rows = self._rows()
        selected = rows[torch.from_numpy(ids[low:high] - self.block.row).to(rows.device)]
        return self.block, ids[low:high], selected.float().cpu().numpy()

    def reset(self) -> None:
        """Mark all rows as unchanged."""
        if self._before is not None:
            self._before.copy_(self._rows())
        self._is_changed.zero_()


class DeltaStream:
    """The deltas of a training that goes on. `stream_deltas` makes it.

    Attributes:
        published: the last published delta, in the process with rank 0, or None.
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
        # The number of steps since the last delta, and between two deltas. All processes publish after the same step
        # without communicating at each.
        self._steps, self._every_steps = 0, 1
        self._began = time.monotonic()

    def step(self) -> None:
        """Count a step of the optimizer, and publish changed rows about every `every_s` seconds.

        Raises:
            QuantizeError, ParityError, PublishError: as `publish_delta`, in each process. The next delta has all
                changed rows.
        """
        self._steps += 1
        if self._steps >= self._every_steps:
            self.publish()

    def publish(self) -> None:
        """Publish the rows that changed since the last delta, if there are any. Every process calls it.

        Raises:
            QuantizeError, ParityError, PublishError: as `publish_delta`, in each process. The next delta has all
                changed rows.
        """
        shards = [shard for shard in self._shards if shard.is_published_here]
        # A row may change in only one of its shards. The whole row is published.
        ids_of_shards = self._group.gathered([(shard.block.table, shard.changed()) for shard in shards])
        ids = self._group.of_first(lambda: _unique_ids(ids_of_shards))
        parts = self._group.gathered(
            [shard.part(ids[shard.block.table]) for shard in shards if shard.block.table in ids]
        )
        self._every_steps = self._group.of_first(lambda: self._publish_parts(parts))
        self._steps = 0
        for shard in self._shards:
            shard.reset()

    def _publish_parts(self, parts: Sequence[_Part]) -> int:
        """Publish, and return the number of steps until the next delta: what takes `every_s`, at most doubled."""
        if changed := _whole_rows(parts):
            self.published = self._publish(changed)
        now = time.monotonic()
        step_s, self._began = (now - self._began) / max(self._steps, 1), now
        return max(1, min(2 * self._every_steps, round(self._every_s / step_s)))


def _mark_looked_up(
    shards: Sequence[_Shard], kernel: Any, inputs: tuple[KeyedJaggedTensor, ...], output: Tensor
) -> None:
    """Mark the rows of a lookup as changed when its gradient is computed. A pipeline looks up much earlier."""
    if not output.requires_grad:
        return
    ids, lengths = inputs[0].values(), inputs[0].length_per_key()

    def mark(_: Tensor) -> None:
        for index, feature_ids in zip(kernel._feature_table_map, ids.split(lengths), strict=True):
            shards[index].mark_changed(feature_ids)

    output.register_hook(mark)  # type: ignore[no-untyped-call]


def _check_tables(lineage: Lineage, blocks: Sequence[_Block]) -> tuple[int, set[str]]:
    """Refuse a lineage unless blocks cover each of its tables exactly once. Returns its version and tables."""
    for table in lineage.bundle.manifest.tables:
        check_takes(table)
        covering = [block for block in blocks if block.table == table.name]
        elements = sum(block.rows * block.columns for block in covering)
        is_inside = all(
            block.row + block.rows <= table.rows and block.column + block.columns <= table.dim for block in covering
        )
        if not is_inside or elements != table.rows * table.dim:
            raise ConfigurationError(
                f"table {table.name!r} of {lineage.bundle.path}: expected {table.rows} rows of {table.dim} columns, "
                f"each once, in TorchRec's fused or dense kernels, got {elements:,} elements in "
                f"{len(covering)} shards: export the module as a new version, or publish by `publish_changes`"
            )
    return int(lineage.bundle.path.name), {table.name for table in lineage.bundle.manifest.tables}


def _unique_ids(ids_of_shards: Sequence[tuple[str, npt.NDArray[np.int64]]]) -> dict[str, npt.NDArray[np.int64]]:
    """The numbers of the rows that changed in any shard, by table. Tables without changed rows are left out."""
    by_table: dict[str, list[npt.NDArray[np.int64]]] = {}
    for table, ids in ids_of_shards:
        if ids.size:
            by_table.setdefault(table, []).append(ids)
    return {table: np.unique(np.concatenate(arrays)) for table, arrays in by_table.items()}


def _whole_rows(parts: Sequence[_Part]) -> dict[str, Changed]:
    """Whole rows by table, assembled from the parts of all shards."""
    ids = _unique_ids([(block.table, block_ids) for block, block_ids, _ in parts])
    dims = {
        table: max(block.column + block.columns for block, _, _ in parts if block.table == table) for table in ids
    }
    rows = {table: np.empty((table_ids.size, dims[table]), np.float32) for table, table_ids in ids.items()}
    for block, block_ids, values in parts:
        if block_ids.size:
            indices = np.searchsorted(ids[block.table], block_ids)
            rows[block.table][indices, block.column : block.column + block.columns] = values
    return {table: (table_ids, rows[table]) for table, table_ids in ids.items()}


class _Group:
    """The processes of a training."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.is_first = dist.get_rank(group) == 0

    def gathered(self, items: list[_T]) -> list[_T]:
        """The items of all processes, in the one with rank 0."""
        lists: list[Any] | None = [None] * dist.get_world_size(self._group) if self.is_first else None
        dist.gather_object(items, lists, group=self._group, group_dst=0)
        return [item for of_process in lists or [] for item in of_process]

    def of_first(self, act: Callable[[], _T]) -> _T:
        """The result of `act` in the process with rank 0. If it fails there, all processes raise its error."""
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
