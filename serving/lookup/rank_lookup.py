"""One rank's part of a sharded lookup."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serving.bundle.formats import WeightDtype
from serving.bundle.plan import Shard
from serving.bundle.tables import OutputDtype, Pooling
from serving.lookup.tbe_call import Segment, TbeCall


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment and its place in the model.

    Attributes:
        feature: the position of the feature in the manifest.
        shard: the shard that the feature reads.
        block: the number of the shard's block among the blocks of rows that its table is cut into.
        dtype: the dtype of the shard's rows.
    """

    feature: int
    shard: Shard
    block: int
    dtype: WeightDtype


class RankLookup(nn.Module):
    """The S segments of one rank: their bags, their TBE call, and the columns of their sums in the answer.

    A tile is a group of columns of an answer that no segment cuts. Widths and columns are counted in tiles here.
    `positions` is always the result of `ShardedProgram.positions_of`: the position of each feature of the model among
    the F requested features, or −1 if it is not requested.

    Args:
        segments: the segments, ordered by feature.
        widths: the width of each feature of the model, in tiles.
        tile: the columns of a tile.
        row_alignment: the alignment of the rank's rows.

    Attributes:
        feature, block, width, column: int64 [S], for each segment the position of its feature, the number of its
            block of rows, its width, and its first column in the feature.
        widths: int64 [features of the model].
        all_targets: int64, `targets` if all features are requested.
        holds_all: whether the sums have all columns of the answer, in order.
    """

    def __init__(
        self, segments: Sequence[PlacedSegment], widths: Sequence[int], tile: int, row_alignment: int
    ) -> None:
        super().__init__()
        self.feature = _int64([segment.feature for segment in segments])
        self.block = _int64([segment.block for segment in segments])
        self.width = _int64([segment.shard.width // tile for segment in segments])
        self.column = _int64([segment.shard.columns[0] // tile for segment in segments])
        self.widths = _int64(widths)
        self.tbe = TbeCall(
            [Segment(segment.dtype, segment.shard.width, segment.shard.offset_bytes) for segment in segments],
            Pooling.SUM,  # means are divided after the merge, by the whole bag's count
            OutputDtype.FP32,
            row_alignment,
        )
        self.tile = tile
        features = torch.arange(len(widths))
        self.all_targets = self.targets(features, features)
        self.holds_all = self.all_targets.equal(torch.arange(sum(widths)))

    def sources(self, features: Tensor, positions: Tensor) -> Tensor:
        """The bags of the requested segments.

        Args:
            features: int64 [F], the requested features.
            positions: int64 [features of the model].

        Returns:
            int64 [requested segments], block · F + position of the feature.
        """
        position = positions.index_select(0, self.feature)
        return (self.block * features.size(0) + position)[position >= 0]

    def targets(self, features: Tensor, positions: Tensor) -> Tensor:
        """The tile of the answer that each tile of the sums is added to.

        Args:
            features: int64 [F], the requested features.
            positions: int64 [features of the model].

        Returns:
            int64 [tiles of the requested segments], the numbers of the answer's tiles.
        """
        position = positions.index_select(0, self.feature)
        is_requested = position >= 0
        width = self.width[is_requested]
        widths = self.widths.index_select(0, features)
        start = (torch.cumsum(widths, 0) - widths).index_select(0, position[is_requested]) + self.column[is_requested]
        moved = start - (torch.cumsum(width, 0) - width)
        return torch.repeat_interleave(moved, width) + torch.arange(int(width.sum()))

    def forward(
        self,
        weights_host: Tensor,
        values: Tensor,
        lengths: Tensor,
        per_sample_weights: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """The partial sums of the requested segments, side by side.

        Args:
            weights_host: uint8, the rank's bytes.
            values: int64 [n], rows of the shards, segment-major.
            lengths: int64 [requested segments, B], bag sizes.
            per_sample_weights: float32 [n], or None.
            positions: int64 [features of the model], or None if all features are requested.

        Returns:
            float32 [B, columns of the requested segments].
        """
        segments: Tensor | None = None
        if positions is not None:
            segments = torch.nonzero(positions.index_select(0, self.feature) >= 0).view(-1)
        if lengths.size(0) == 0:
            return torch.empty([lengths.size(1), 0])
        offsets: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1))
        pooled: Tensor = self.tbe.forward(weights_host, values, offsets, per_sample_weights, segments)
        return pooled

    def add_to(self, sums: Tensor | None, part: Tensor, features: Tensor | None, positions: Tensor | None) -> Tensor:
        """Add this rank's partial sums to the sums of the ranks before it.

        Args:
            sums: float32 [B, D], the sums of the ranks before, or None for the first rank. They may be overwritten.
            part: float32 [B, columns of the requested segments], the sums of this rank. They may be overwritten.
            features: int64 [F], the requested features, or None for all.
            positions: int64 [features of the model], or None for all.

        Returns:
            float32 [B, D].
        """
        if self.holds_all and features is None:
            return part if sums is None else sums.add_(part)
        targets, widths = self.all_targets, self.widths
        if features is not None and positions is not None:
            targets, widths = self.targets(features, positions), widths.index_select(0, features)
        samples, tiles = part.size(0), int(widths.sum())
        if sums is None:
            sums = torch.zeros([samples, tiles * self.tile])
        part = part.view(samples, targets.size(0), self.tile)
        sums.view(samples, tiles, self.tile).index_add_(1, targets, part)
        return sums


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
