"""The first and the last step of a lookup: one TBE call, and the conversion of its sums to the answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from serving.bundle.formats import WeightDtype
from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype, Pooling

# The operator's numbers for fbgemm_gpu's EmbeddingLocation.HOST, PoolingMode and SparseType.
_HOST = 3
_POOLING_MODE = {Pooling.SUM: 0, Pooling.MEAN: 1}
_OUTPUT_DTYPE = {OutputDtype.FP32: 0, OutputDtype.FP16: 1}
# Arguments of the operator, in its order, for the widest segment of each dtype. A `RowFormat` names one of them.
_MAX_WIDTHS = ("max_int2_D", "max_int4_D", "max_int8_D", "max_float16_D", "max_float32_D")


@dataclass(frozen=True, slots=True)
class Segment:
    """A feature over a shard, which FBGEMM calls a feature.

    Attributes:
        dtype: the dtype of the shard's rows.
        width: the columns of the shard.
        offset_bytes: the offset of the shard in the rank's bytes.
    """

    dtype: WeightDtype
    width: int
    offset_bytes: int


class TbeCall(nn.Module):
    """The operator, and its constant arguments for the S segments of a rank.

    Args:
        segments: the segments in the order of the answer.
        pooling: the pooling of all segments.
        output_dtype: the dtype of the answer.
        row_alignment: the alignment of the rank's rows.

    Attributes:
        weights_uvm: uint8 [0], because all rows are in host memory.
        placements: int32 [S], the location of the rows: host memory.
        weights_offsets: int64 [S], `Segment.offset_bytes`.
        weights_tys: uint8 [S], the number of the dtype in SparseType.
        dims: int32 [S], the widths.
        d_offsets: int32 [S + 1], the first column of each segment in the answer; the last is `total_d`.
        max_widths: the arguments `_MAX_WIDTHS`.
    """

    def __init__(
        self, segments: Sequence[Segment], pooling: Pooling, output_dtype: OutputDtype, row_alignment: int
    ) -> None:
        super().__init__()
        widths = [segment.width for segment in segments]
        # Attributes, not buffers: Python finds a buffer by a search that takes a microsecond.
        self.weights_uvm = torch.empty(0, dtype=torch.uint8)
        self.placements = torch.tensor([_HOST] * len(segments), dtype=torch.int32)
        self.weights_offsets = torch.tensor([segment.offset_bytes for segment in segments], dtype=torch.int64)
        self.weights_tys = torch.tensor([segment.dtype.format.sparse_type for segment in segments], dtype=torch.uint8)
        self.dims = torch.tensor(widths, dtype=torch.int32)
        self.d_offsets = torch.tensor([0, *accumulate(widths)], dtype=torch.int32)
        self.total_d = sum(widths)
        self.max_widths = _max_widths(segments)
        self.row_alignment = row_alignment
        self.pooling_mode = _POOLING_MODE[pooling]
        self.output_dtype = _OUTPUT_DTYPE[output_dtype]

    def forward(
        self,
        weights_host: Tensor,
        values: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        segments: Tensor | None,
    ) -> Tensor:
        """Look up and pool.

        Args:
            weights_host: uint8, the rank's bytes.
            values: int64 [N], rows of the shards, segment-major.
            offsets: int64 [requested segments · B + 1], the start of each bag in `values`; the last is N.
            per_sample_weights: float32 [N], or None.
            segments: int64 [requested segments], their positions among the S segments, or None for all.

        Returns:
            [B, columns of the requested segments], float32 or float16.
        """
        placements = self.placements
        weights_offsets = self.weights_offsets
        weights_tys = self.weights_tys
        d_offsets = self.d_offsets
        total_d = self.total_d
        if segments is not None:
            placements = placements.index_select(0, segments)
            weights_offsets = weights_offsets.index_select(0, segments)
            weights_tys = weights_tys.index_select(0, segments)
            dims = self.dims.index_select(0, segments)
            d_offsets = torch.zeros(dims.size(0) + 1, dtype=torch.int32)
            torch.cumsum(dims, 0, dtype=torch.int32, out=d_offsets[1:])
            total_d = int(d_offsets[-1])
        max_int2_d, max_int4_d, max_int8_d, max_float16_d, max_float32_d = self.max_widths
        # By position: passing arguments by name takes two microseconds longer.
        pooled: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            weights_host,
            self.weights_uvm,
            placements,
            weights_offsets,
            weights_tys,
            d_offsets,
            total_d,
            max_int2_d,
            max_int4_d,
            max_int8_d,
            max_float16_d,
            max_float32_d,
            values,
            offsets,
            self.pooling_mode,
            per_sample_weights,
            self.output_dtype,
            None,  # lxu_cache_weights
            None,  # lxu_cache_locations
            self.row_alignment,
        )
        return pooled


def _max_widths(segments: Sequence[Segment]) -> list[int]:
    """The width of the widest segment for each of `_MAX_WIDTHS`, or 0.

    Raises:
        KeyError: a dtype needs an argument that `TbeCall` does not pass to the operator.
    """
    widths = dict.fromkeys(_MAX_WIDTHS, 0)
    for segment in segments:
        argument = segment.dtype.format.max_width_argument
        widths[argument] = max(widths[argument], segment.width)
    return list(widths.values())


class SumsToAnswer(nn.Module):
    """Multiplies MEAN features by 1/count, as FBGEMM's kernel itself does, and rounds once.

    Args:
        manifest: the features and tables.

    Attributes:
        is_mean: whether a feature is a mean, bool [features of the model].
        dims: the width of a feature in the answer, int64 [features of the model].
        tile: the columns of a tile. Each tile of an answer belongs to one feature.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        tables = manifest.feature_tables
        dims = [table.dim for table in tables]
        is_mean = [table.pooling is Pooling.MEAN for table in tables]
        self.is_mean = torch.tensor(is_mean)
        self.dims = torch.tensor(dims)
        self.divides = any(is_mean)
        self.rounds_to_half = manifest.output_dtype is OutputDtype.FP16
        self.tile = math.gcd(*dims)

    def forward(self, sums: Tensor, offsets: Tensor, features: Tensor | None) -> Tensor:
        """The answer for the sums of a lookup.

        Args:
            sums: float32 [B, D], which may be overwritten.
            offsets: int64 [F·B + 1], as `OneRankProgram.forward` takes them.
            features: int64 [F] or None, as `OneRankProgram.forward` takes them.

        Returns:
            [B, D], float32 or float16.
        """
        if self.divides:
            is_mean, dims = self.is_mean, self.dims
            if features is not None:
                is_mean, dims = is_mean.index_select(0, features), dims.index_select(0, features)
            counts = torch.diff(offsets).view(is_mean.size(0), sums.size(0))
            scale = torch.where(is_mean.unsqueeze(1), 1.0 / counts.clamp(min=1), 1.0)
            by_tile = torch.repeat_interleave(scale, dims // self.tile, dim=0)
            tiles = sums.view(sums.size(0), by_tile.size(0), self.tile)
            tiles.mul_(by_tile.t().unsqueeze(2))
        return sums.half() if self.rounds_to_half else sums
