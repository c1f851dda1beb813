"""A lookup over several ranks: split the request, make one TBE call on each rank, and merge the answers.

Each of the three steps is a method, so that ranks can be on other hosts: the router splits and merges, and each rank
looks up.

A segment is one feature over one shard. Segments are ordered rank by rank, and by feature on each rank.
"""

import math

import torch
from torch import Tensor, nn

from serving.bundle.manifest import Manifest
from serving.bundle.plan import row_blocks
from serving.bundle.segments import segments_by_rank
from serving.lookup.rank_lookup import PlacedSegment, RankLookup
from serving.lookup.tbe_call import SumsToAnswer


class ShardedProgram(nn.Module):
    """The lookup of tables that are cut or copied over ranks, for all plans.

    `values`, `offsets`, `per_sample_weights` and `features` always describe the request, as for
    `serving.lookup.one_rank_program.OneRankProgram.forward`.

    Args:
        manifest: the features, tables and plan. Its parity and files are not read.

    Attributes:
        weights_host: the bytes of each rank, uint8. They are empty until the engine sets them.
        placement_digest: `Manifest.placement_digest` of the manifest that this was compiled for.
        row_bounds: for each feature the bounds of its table's blocks of rows, int64 [blocks + 1].
        most_blocks: the largest number of blocks of rows of a table.
        order: int32 [segments], `split_order` if all features are requested.
        is_cut_in_order: whether ids that were cut by blocks of rows are in the order of the segments.
        tile: the columns of a tile. No segment cuts a tile.
    """

    weights_host: list[Tensor]
    row_bounds: list[Tensor]

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        tables = manifest.feature_tables
        by_rank = _placed_segments(manifest)
        cuts = (column for segments in by_rank for segment in segments for column in segment.shard.columns)
        self.tile = math.gcd(*cuts, *(table.dim for table in tables))
        widths = [table.dim // self.tile for table in tables]
        self.placement_digest = manifest.placement_digest
        self.weights_host = [torch.empty(0, dtype=torch.uint8) for _ in by_rank]
        self.ranks = nn.ModuleList(
            RankLookup(segments, widths, self.tile, manifest.plan.row_alignment) for segments in by_rank
        )
        self.to_answer = SumsToAnswer(manifest)

        pieces = manifest.plan.pieces_by_table
        blocks = [row_blocks(pieces[table.name]) for table in tables]
        self.row_bounds = [torch.tensor([0, *(stop for _, stop in blocks_of_table)]) for blocks_of_table in blocks]
        self.most_blocks = max(map(len, blocks))
        everything = torch.arange(len(tables))
        self.order = self.split_order(everything, everything)
        # So it is where all tables are cut row-wise alike. A block that a short table lacks takes no position:
        # it has no ids.
        self.is_cut_in_order = bool((torch.diff(self.order) > 0).all())

    def positions_of(self, features: Tensor) -> Tensor:
        """The position of each feature of the model in `features`, or −1 if the request does not ask for it.

        Args:
            features: int64 [F], the requested features.

        Returns:
            int64 [features of the model].
        """
        positions = torch.full([len(self.row_bounds)], -1, dtype=torch.int64)
        positions[features] = torch.arange(features.size(0))
        return positions

    def split_order(self, features: Tensor, positions: Tensor) -> Tensor:
        """The bags of the requested segments, rank by rank.

        Args:
            features: int64 [F], the requested features.
            positions: int64 [features of the model], as `positions_of` returns them.

        Returns:
            int32 [requested segments], block · F + position of the feature.
        """
        return torch.cat([rank.sources(features, positions) for rank in self.ranks]).int()  # type: ignore[operator]

    def split(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The inputs of each rank's lookup.

        Returns:
            For each rank: rows of its shards, int64 [n]; bag sizes, int64 [requested segments, B]; weights,
            float32 [n], or None.
        """
        bounds = self.row_bounds
        order = self.order
        positions: Tensor | None = None
        if features is not None:
            positions = self.positions_of(features)
            order = self.split_order(features, positions)
            numbers: list[int] = features.tolist()
            bounds = [self.row_bounds[feature] for feature in numbers]
        lengths, values, weights = self._cut_rows(values, offsets, per_sample_weights, bounds)
        if features is None and self.is_cut_in_order:
            lengths = lengths.index_select(0, order)
        else:
            lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, values, weights)
        return self._by_rank(values, lengths, weights, positions)

    def _cut_rows(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, bounds: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sort ids by their blocks of rows, and count them from the start of their block.

        Args:
            bounds: `row_bounds` of the F requested features.

        Returns:
            Bag sizes, int64 [blocks · F, B]; ids, int64 [N]; weights, float32 [N], or None.
        """
        features = len(bounds)
        lengths, weights = torch.diff(offsets), per_sample_weights
        samples = lengths.size(0) // features
        if self.most_blocks > 1:
            lengths, values, weights, _, _ = torch.ops.fbgemm.block_bucketize_sparse_features(
                lengths,
                values,
                bucketize_pos=False,
                sequence=False,
                block_sizes=torch.ones(features, dtype=torch.int64),  # not read: the blocks are those of `bounds`
                my_size=self.most_blocks,
                weights=weights,
                block_bucketize_pos=bounds,
            )
        return lengths.view(self.most_blocks * features, samples), values, weights

    def _by_rank(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, positions: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Divide ids [N], bag sizes [requested segments, B] and weights [N], in the order of segments, by rank."""
        requests: list[tuple[Tensor, Tensor, Tensor | None]] = []
        segment, id_ = 0, 0
        for rank in self.ranks:
            feature: Tensor = rank.feature  # type: ignore[assignment]
            segments = feature.size(0)
            if positions is not None:
                segments = int((positions.index_select(0, feature) >= 0).sum())
            bags = lengths.narrow(0, segment, segments)
            ids = int(bags.sum())
            weights_here: Tensor | None = None
            if weights is not None:
                weights_here = weights.narrow(0, id_, ids)
            requests.append((values.narrow(0, id_, ids), bags, weights_here))
            segment += segments
            id_ += ids
        return requests

    def lookup(
        self,
        rank: int,
        values: Tensor,
        lengths: Tensor,
        per_sample_weights: Tensor | None,
        features: Tensor | None,
    ) -> Tensor:
        """One rank's partial sums.

        Args:
            rank: the number of the rank.
            values: int64 [n], as `split` returns them for the rank.
            lengths: int64 [requested segments, B], likewise.
            per_sample_weights: float32 [n] or None, likewise.
            features: the features of the request.

        Returns:
            float32 [B, columns of the rank's requested segments].
        """
        positions = None if features is None else self.positions_of(features)
        pooled = torch.empty(0)
        for number, ranks_lookup in enumerate(self.ranks):
            if number == rank:
                pooled = ranks_lookup(self.weights_host[number], values, lengths, per_sample_weights, positions)
        return pooled

    def merge(self, pooled: list[Tensor], offsets: Tensor, features: Tensor | None) -> Tensor:
        """The answer from the partial sums of all ranks.

        Args:
            pooled: the result of `lookup` for each rank. It may be overwritten.
            offsets: the offsets of the request.
            features: the features of the request.

        Returns:
            [B, D], float32 or float16.
        """
        positions = None if features is None else self.positions_of(features)
        sums: Tensor | None = None
        for number, rank in enumerate(self.ranks):
            sums = rank.add_to(sums, pooled[number], features, positions)  # type: ignore[operator]
        assert sums is not None  # noqa: S101  for TorchScript: there is a rank
        return self.to_answer.forward(sums, offsets, features)

    def forward(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
    ) -> Tensor:
        """Look up and pool, as `serving.lookup.one_rank_program.OneRankProgram.forward`."""
        requests = self.split(values, offsets, per_sample_weights, features)
        positions = None if features is None else self.positions_of(features)
        sums: Tensor | None = None
        for number, rank in enumerate(self.ranks):
            ids, lengths, weights = requests[number]
            rows = self.weights_host[number]
            # Added at once, so that the next rank's sums reuse the memory of this rank's.
            sums = rank.add_to(sums, rank.forward(rows, ids, lengths, weights, positions), features, positions)  # type: ignore[operator]
        assert sums is not None  # noqa: S101
        return self.to_answer.forward(sums, offsets, features)


def _placed_segments(manifest: Manifest) -> list[list[PlacedSegment]]:
    """The segments of each rank, by feature."""
    blocks = {name: row_blocks(shards) for name, shards in manifest.plan.pieces_by_table.items()}
    dtypes = {table.name: table.dtype for table in manifest.tables}
    return [
        [
            PlacedSegment(feature, shard, blocks[shard.table].index(shard.rows), dtypes[shard.table])
            for feature, shard, _, _ in segments
        ]
        for segments in segments_by_rank(manifest)
    ]
