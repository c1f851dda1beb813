"""Plan to TorchScript: the lookup, compiled for one set of tables, holding none of their weights.

This is the one file that knows TorchScript.
"""

import math
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from serving.bundle import Manifest, OutputDtype, Pooling, WeightDtype

# fbgemm_gpu's enums, as the operator takes them: SparseType.as_int(), EmbeddingLocation.HOST, PoolingMode.
_SPARSE_TYPE = {
    WeightDtype.FP32: 0,
    WeightDtype.FP16: 1,
    WeightDtype.INT8: 2,
    WeightDtype.INT4: 3,
    WeightDtype.INT2: 4,
}
_HOST = 3
_SUM = 0
_MEAN = 1


class LookupProgram(nn.Module):
    """All tables on one rank: exactly one TBE call.

    A TBE call pools either by SUM or by MEAN. Where a model has both, the call sums and the answer is
    multiplied by 1/count, as the kernel itself does for MEAN; SUM features are multiplied by 1.

    Args:
        manifest: features, tables and plan; its parity and files do not matter.

    Attributes:
        weights_host: the rank's rows as uint8; empty until the engine sets it.
        layout: what this was compiled for, `Manifest.layout`.
    """

    weights_host: Tensor
    weights_uvm: Tensor
    placements: Tensor
    weights_offsets: Tensor
    weights_tys: Tensor
    dims: Tensor
    d_offsets: Tensor
    is_mean: Tensor

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        tables = manifest.feature_tables
        dims = [table.dim for table in tables]
        offsets = {shard.table: shard.offset_bytes for shard in manifest.plan.shards}
        poolings = {table.pooling for table in tables}

        self.layout = manifest.layout
        self.weights_host = torch.empty(0, dtype=torch.uint8)
        self.register_buffer("weights_uvm", torch.empty(0, dtype=torch.uint8))
        self._constant("placements", [_HOST] * len(tables), torch.int32)
        self._constant("weights_offsets", [offsets[table.name] for table in tables], torch.int64)
        self._constant("weights_tys", [_SPARSE_TYPE[table.dtype] for table in tables], torch.uint8)
        self._constant("dims", dims, torch.int32)
        self._constant("d_offsets", [sum(dims[:i]) for i in range(len(dims) + 1)], torch.int32)
        self._constant("is_mean", [table.pooling is Pooling.MEAN for table in tables], torch.bool)
        self.total_d = sum(dims)
        # The kernel's bounds by dtype, in the order of the operator's arguments.
        self.max_dims = [
            max((table.dim for table in tables if table.dtype is dtype), default=0)
            for dtype in (
                WeightDtype.INT2,
                WeightDtype.INT4,
                WeightDtype.INT8,
                WeightDtype.FP16,
                WeightDtype.FP32,
            )
        ]
        self.row_alignment = manifest.plan.row_alignment
        self.mixed = len(poolings) > 1
        self.pooling_mode = _MEAN if poolings == {Pooling.MEAN} else _SUM
        self.rounds_to_half = manifest.output_dtype is OutputDtype.FP16
        # A mean is taken in FP32 and rounded once.
        self.tbe_output_dtype = _SPARSE_TYPE[
            WeightDtype.FP16 if self.rounds_to_half and not self.mixed else WeightDtype.FP32
        ]
        # Columns come in runs of this many that belong to one feature, whatever the features asked for.
        self.run = math.gcd(*dims)

    def _constant(self, name: str, values: list[int] | list[bool], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=dtype))

    def forward(
        self,
        values: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        features: Tensor | None,
    ) -> Tensor:
        """Look up and pool.

        Args:
            values: int64 ids, feature-major, each in [0, rows) [N].
            offsets: int64, where each bag starts in `values`; ends with N [F·B + 1].
            per_sample_weights: float32 [N], or None.
            features: int64 positions of the F features, or None for all in the manifest's order.

        Returns:
            [B, D], FP32 or FP16.
        """
        placements = self.placements
        weights_offsets = self.weights_offsets
        weights_tys = self.weights_tys
        dims = self.dims
        d_offsets = self.d_offsets
        is_mean = self.is_mean
        total_d = self.total_d
        if features is not None:
            placements = placements.index_select(0, features)
            weights_offsets = weights_offsets.index_select(0, features)
            weights_tys = weights_tys.index_select(0, features)
            dims = dims.index_select(0, features)
            is_mean = is_mean.index_select(0, features)
            d_offsets = torch.zeros(dims.size(0) + 1, dtype=torch.int32)
            torch.cumsum(dims, 0, dtype=torch.int32, out=d_offsets[1:])
            total_d = int(d_offsets[-1])
        pooled: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            dev_weights=self.weights_host,
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
            output_dtype=self.tbe_output_dtype,
            row_alignment=self.row_alignment,
        )
        if self.mixed:
            counts = torch.diff(offsets).view(is_mean.size(0), -1)
            scale = torch.where(is_mean.unsqueeze(1), 1.0 / counts.clamp(min=1), 1.0)
            by_run = torch.repeat_interleave(scale, dims // self.run, dim=0)
            runs = pooled.view(pooled.size(0), by_run.size(0), self.run)
            runs.mul_(by_run.t().unsqueeze(2))
            if self.rounds_to_half:
                pooled = pooled.half()
        return pooled


def compile_program(manifest: Manifest) -> torch.jit.ScriptModule:
    """The lookup of `manifest` as TorchScript."""
    with warnings.catch_warnings():
        # Deprecated, and what there is: torch.export takes its place here when it can call FBGEMM in a server.
        warnings.filterwarnings("ignore", message=".*torch.jit.*deprecated", category=DeprecationWarning)
        program: torch.jit.ScriptModule = torch.jit.script(LookupProgram(manifest).eval())
    return program


def save_program(program: torch.jit.ScriptModule, path: Path) -> None:
    """Write `program`, without the weights it may be using."""
    weights = program.weights_host
    program.weights_host = torch.empty(0, dtype=torch.uint8)
    try:
        program.save(str(path))
    finally:
        program.weights_host = weights
