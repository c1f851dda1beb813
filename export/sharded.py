"""A lookup over several ranks: split the request, one TBE call on each rank, merge the answers.

The three steps are methods of their own, for ranks that are elsewhere: whoever holds the request splits and
merges, and each rank looks up. A segment is one feature over one shard. The segments of all ranks, rank by rank,
are the order in which everything here is laid out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from export.finish import Finish
from export.tbe import Segment, TbeCall
from serving.bundle import Manifest, Pooling, WeightDtype
from serving.plan import Shard, row_blocks

# What a rank is sent: ids in its shards' own rows [n], bag sizes [segments, B], weights [n] or None.
RankRequest = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A segment: the position of its feature, its shard, and which block of its table's rows that is."""

    feature: int
    shard: Shard
    block: int
    dtype: WeightDtype


class RankLookup(nn.Module):
    """The segments of one rank: its TBE, what they are asked, and where their sums belong.

    Args:
        segments: by feature.
        widths: of each of the model's features in the answer, in runs.
        run: columns of a run.
        row_alignment: of the rank's bytes.
    """

    feature: Tensor
    block: Tensor
    width: Tensor
    column: Tensor
    widths: Tensor
    all_targets: Tensor

    def __init__(self, segments: Sequence[_Placed], widths: Sequence[int], run: int, row_alignment: int) -> None:
        super().__init__()
        self._constant("feature", [each.feature for each in segments])
        self._constant("block", [each.block for each in segments])
        self._constant("width", [each.shard.width // run for each in segments])
        self._constant("column", [each.shard.columns[0] // run for each in segments])
        self._constant("widths", widths)
        self.tbe = TbeCall(
            [Segment(each.dtype, each.shard.width, each.shard.offset_bytes) for each in segments],
            Pooling.SUM,  # means are divided after the merge, by the whole bag's count
            WeightDtype.FP32,
            row_alignment,
        )
        self.run = run
        features = torch.arange(len(widths))
        self.register_buffer("all_targets", self.targets(features, features))
        # All columns of all features, in order: sums that look like the answer.
        self.holds_all = self.all_targets.equal(torch.arange(sum(widths)))

    def _constant(self, name: str, values: Sequence[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64))

    @torch.jit.export
    def sources(self, features: Tensor, rows: Tensor) -> Tensor:
        """Which bags each segment asked takes: a row of [blocks, F]; `rows` as `ShardedProgram.rows_of` gives it."""
        row = rows.index_select(0, self.feature)
        return (self.block * features.size(0) + row)[row >= 0]

    @torch.jit.export
    def targets(self, features: Tensor, rows: Tensor) -> Tensor:
        """Which runs of the answer the runs of all segments asked, side by side, are added to."""
        row = rows.index_select(0, self.feature)
        asked = row >= 0
        width = self.width[asked]
        widths = self.widths.index_select(0, features)
        start = (torch.cumsum(widths, 0) - widths).index_select(0, row[asked]) + self.column[asked]
        moved = start - (torch.cumsum(width, 0) - width)
        return torch.repeat_interleave(moved, width) + torch.arange(int(width.sum()))

    def forward(
        self,
        weights_host: Tensor,
        values: Tensor,
        lengths: Tensor,
        per_sample_weights: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Partial sums FP32 [B, widths of the segments asked]; `rows` as `ShardedProgram.rows_of` gives it."""
        segments: Tensor | None = None
        if rows is not None:
            segments = torch.nonzero(rows.index_select(0, self.feature) >= 0).view(-1)
        if lengths.size(0) == 0:
            return torch.empty([lengths.size(1), 0])
        offsets: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1))
        pooled: Tensor = self.tbe(weights_host, values, offsets, per_sample_weights, segments)
        return pooled

    @torch.jit.export
    def add_to(self, sums: Tensor | None, part: Tensor, features: Tensor | None, rows: Tensor | None) -> Tensor:
        """Add this rank's partial sums, which may be overwritten, to those of the ranks before it [B, D]."""
        if self.holds_all and features is None:
            return part if sums is None else sums.add_(part)
        targets, widths = self.all_targets, self.widths
        if features is not None and rows is not None:
            targets, widths = self.targets(features, rows), widths.index_select(0, features)
        samples, runs = part.size(0), int(widths.sum())
        if sums is None:
            sums = torch.zeros([samples, runs * self.run])
        part = part.view(samples, targets.size(0), self.run)
        sums.view(samples, runs, self.run).index_add_(1, targets, part)
        return sums


class ShardedProgram(nn.Module):
    """Tables cut or copied over ranks, every way that a plan can.

    Args:
        manifest: features, tables and plan; its parity and files do not matter.

    Attributes:
        weights_host: each rank's bytes, uint8; empty until the engine sets them.
        layout: what this was compiled for, `Manifest.layout`.
    """

    weights_host: list[Tensor]
    row_bounds: list[Tensor]
    order: Tensor

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        tables = manifest.feature_tables
        by_rank = _place(manifest)
        # Columns come in runs of this many that no segment cuts.
        cuts = (column for segments in by_rank for each in segments for column in each.shard.columns)
        self.run = math.gcd(*cuts, *(table.dim for table in tables))
        widths = [table.dim // self.run for table in tables]
        self.layout = manifest.layout
        self.weights_host = [torch.empty(0, dtype=torch.uint8) for _ in by_rank]
        self.ranks = nn.ModuleList(
            RankLookup(segments, widths, self.run, manifest.plan.row_alignment) for segments in by_rank
        )
        self.finish = Finish(manifest)

        pieces = manifest.plan.pieces_by_table
        blocks = [row_blocks(pieces[table.name]) for table in tables]
        self.row_bounds = [torch.tensor([0, *(stop for _, stop in each)]) for each in blocks]
        self.most_blocks = max(map(len, blocks))
        everything = torch.arange(len(tables))
        self.register_buffer("order", self.split_order(everything, everything))
        # Where all tables are cut row-wise alike, cutting the ids already puts them rank by rank: blocks that a
        # short table does not have are left out, and have no ids.
        self.is_cut_in_order = bool((torch.diff(self.order) > 0).all())

    @torch.jit.export
    def rows_of(self, features: Tensor) -> Tensor:
        """The place of each of the model's features in `features`; −1 where it is not asked for."""
        rows = torch.full([len(self.row_bounds)], -1, dtype=torch.int64)
        rows[features] = torch.arange(features.size(0))
        return rows

    @torch.jit.export
    def split_order(self, features: Tensor, rows: Tensor) -> Tensor:
        """Which bags the segments asked take, rank by rank: rows of [blocks, F], int32."""
        return torch.cat([rank.sources(features, rows) for rank in self.ranks]).int()  # type: ignore[operator]

    @torch.jit.export
    def split(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """What each rank is asked; the arguments are those of `forward`.

        Returns:
            For each rank: ids in its shards' own rows, int64 [n]; bag sizes, int64 [segments, B]; weights
            float32 [n], or None.
        """
        bounds = self.row_bounds
        order = self.order
        rows_of: Tensor | None = None
        if features is not None:
            rows_of = self.rows_of(features)
            order = self.split_order(features, rows_of)
            positions: list[int] = features.tolist()
            bounds = [self.row_bounds[position] for position in positions]
        rows = len(bounds)
        lengths, weights = torch.diff(offsets), per_sample_weights
        samples = lengths.size(0) // rows
        if self.most_blocks > 1:
            lengths, values, weights, _, _ = torch.ops.fbgemm.block_bucketize_sparse_features(
                lengths,
                values,
                bucketize_pos=False,
                sequence=False,
                block_sizes=torch.ones(rows, dtype=torch.int64),  # for cuts at equal distances; ours are below
                my_size=self.most_blocks,
                weights=weights,
                block_bucketize_pos=bounds,
            )
            rows *= self.most_blocks
        lengths = lengths.view(rows, samples)
        if features is None and self.is_cut_in_order:
            lengths = lengths.index_select(0, order)
        else:
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, weights)
        return self._by_rank(values, lengths, weights, rows_of)

    def _by_rank(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, rows: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        requests: list[tuple[Tensor, Tensor, Tensor | None]] = []
        segment, id_ = 0, 0
        for rank in self.ranks:
            feature: Tensor = rank.feature  # type: ignore[assignment]
            segments = feature.size(0)
            if rows is not None:
                segments = int((rows.index_select(0, feature) >= 0).sum())
            bags = lengths.narrow(0, segment, segments)
            ids = int(bags.sum())
            weights_here: Tensor | None = None
            if weights is not None:
                weights_here = weights.narrow(0, id_, ids)
            requests.append((values.narrow(0, id_, ids), bags, weights_here))
            segment += segments
            id_ += ids
        return requests

    @torch.jit.export
    def lookup(
        self,
        rank: int,
        values: Tensor,
        lengths: Tensor,
        per_sample_weights: Tensor | None,
        features: Tensor | None,
    ) -> Tensor:
        """One rank's partial sums, FP32 [B, widths of its segments], for what `split` gave it."""
        rows = None if features is None else self.rows_of(features)
        pooled = torch.empty(0)
        for number, ranks_lookup in enumerate(self.ranks):
            if number == rank:
                pooled = ranks_lookup(self.weights_host[number], values, lengths, per_sample_weights, rows)
        return pooled

    @torch.jit.export
    def merge(self, pooled: list[Tensor], offsets: Tensor, features: Tensor | None) -> Tensor:
        """The answer [B, D] from the partial sums of all ranks, which it may overwrite.

        `offsets` and `features` are the request's.
        """
        rows = None if features is None else self.rows_of(features)
        sums: Tensor | None = None
        for number, rank in enumerate(self.ranks):
            sums = rank.add_to(sums, pooled[number], features, rows)  # type: ignore[operator]
        assert sums is not None  # noqa: S101  for TorchScript: there is a rank
        return self.finish(sums, offsets, features)  # type: ignore[no-any-return]

    def forward(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
    ) -> Tensor:
        """Look up and pool, as `export.program.OneRankProgram.forward` says."""
        requests = self.split(values, offsets, per_sample_weights, features)
        rows = None if features is None else self.rows_of(features)
        sums: Tensor | None = None
        for number, rank in enumerate(self.ranks):
            ids, lengths, weights = requests[number]
            # Added at once, so that the next rank's sums take the memory that this one's leave.
            sums = rank.add_to(sums, rank(self.weights_host[number], ids, lengths, weights, rows), features, rows)  # type: ignore[operator]
        assert sums is not None  # noqa: S101
        return self.finish(sums, offsets, features)  # type: ignore[no-any-return]


def _place(manifest: Manifest) -> list[list[_Placed]]:
    """The segments of each rank, by feature."""
    by_rank: list[list[_Placed]] = [[] for _ in manifest.plan.ranks]
    pieces = manifest.plan.pieces_by_table
    for feature, table in enumerate(manifest.feature_tables):
        blocks = row_blocks(pieces[table.name])
        for shard in pieces[table.name]:
            by_rank[shard.rank].append(_Placed(feature, shard, blocks.index(shard.rows), table.dtype))
    return by_rank
