"""One rank's lookup: exactly one call of FBGEMM's TBE operator, in a form that TorchScript compiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serving.bundle import Pooling, WeightDtype

# fbgemm_gpu's enums, as the operator takes them: SparseType.as_int(), EmbeddingLocation.HOST, PoolingMode.
SPARSE_TYPE = {
    WeightDtype.FP32: 0,
    WeightDtype.FP16: 1,
    WeightDtype.INT8: 2,
    WeightDtype.INT4: 3,
    WeightDtype.INT2: 4,
}
_HOST = 3
_POOLING_MODE = {Pooling.SUM: 0, Pooling.MEAN: 1}


@dataclass(frozen=True, slots=True)
class Segment:
    """What TBE calls a feature: ids of one feature, looked up in rows `width` wide at a byte offset."""

    dtype: WeightDtype
    width: int
    offset_bytes: int


class TbeCall(nn.Module):
    """The operator's constants for one rank.

    Args:
        segments: S of them, in the order of the answer.
        pooling: of all of them.
        output_dtype: of the answer, FP32 or FP16.
        row_alignment: of the rank's bytes.
    """

    weights_uvm: Tensor
    placements: Tensor
    weights_offsets: Tensor
    weights_tys: Tensor
    dims: Tensor
    d_offsets: Tensor

    def __init__(
        self, segments: Sequence[Segment], pooling: Pooling, output_dtype: WeightDtype, row_alignment: int
    ) -> None:
        super().__init__()
        widths = [segment.width for segment in segments]
        self.register_buffer("weights_uvm", torch.empty(0, dtype=torch.uint8))
        self._constant("placements", [_HOST] * len(segments), torch.int32)
        self._constant("weights_offsets", [segment.offset_bytes for segment in segments], torch.int64)
        self._constant("weights_tys", [SPARSE_TYPE[segment.dtype] for segment in segments], torch.uint8)
        self._constant("dims", widths, torch.int32)
        self._constant("d_offsets", [sum(widths[:i]) for i in range(len(widths) + 1)], torch.int32)
        self.total_d = sum(widths)
        # The kernel's bounds by dtype, in the order of the operator's arguments.
        self.max_dims = [
            max((segment.width for segment in segments if segment.dtype is dtype), default=0)
            for dtype in (
                WeightDtype.INT2,
                WeightDtype.INT4,
                WeightDtype.INT8,
                WeightDtype.FP16,
                WeightDtype.FP32,
            )
        ]
        self.row_alignment = row_alignment
        self.pooling_mode = _POOLING_MODE[pooling]
        self.output_dtype = SPARSE_TYPE[output_dtype]

    def _constant(self, name: str, values: list[int], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=dtype))

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
            weights_host: the rank's bytes, uint8.
            values: int64 ids, segment-major, each in [0, rows) [N].
            offsets: int64, where each bag starts in `values`; ends with N [S·B + 1].
            per_sample_weights: float32 [N], or None.
            segments: int64 positions of the segments that are asked, or None for all.

        Returns:
            [B, sum of widths].
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
        pooled: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=weights_host,
            uvm_weights=self.weights_uvm,
            weights_placements=placements,
            weights_offsets=weights_offsets,
            weights_tys=weights_tys,
            D_offsets=d_offsets,
            total_D=total_d,
            max_int2_D=self.max_dims[0],
            max_int4_D=self.max_dims[1],
            max_int8_D=self.max_dims[2],
            max_float16_D=self.max_dims[3],
            max_float32_D=self.max_dims[4],
            indices=values,
            offsets=offsets,
            pooling_mode=self.pooling_mode,
            indice_weights=per_sample_weights,
            output_dtype=self.output_dtype,
            row_alignment=self.row_alignment,
        )
        return pooled
