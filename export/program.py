"""Plan to TorchScript: the lookup, compiled for one set of tables, holding none of their weights.

This is the one file that knows how a program is compiled and saved.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from export.finish import Finish
from export.sharded import ShardedProgram
from export.tbe import Segment, TbeCall
from serving.bundle import Manifest, OutputDtype, Pooling, WeightDtype
from serving.engine import torchscript


class OneRankProgram(nn.Module):
    """All tables whole on one rank: exactly one TBE call, no split and no merge.

    A TBE call pools either by SUM or by MEAN. Where a model has both, the call sums, and the means are divided
    afterwards.

    Args:
        manifest: features, tables and plan; its parity and files do not matter.

    Attributes:
        weights_host: the rank's rows, a list of one uint8 tensor; empty until the engine sets it.
        layout: what this was compiled for, `Manifest.layout`.
    """

    weights_host: list[Tensor]

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        offsets = {shard.table: shard.offset_bytes for shard in manifest.plan.shards}
        tables = manifest.feature_tables
        poolings = {table.pooling for table in tables}
        self.mixed = len(poolings) > 1
        # A mean is taken in FP32 and rounded once.
        half = manifest.output_dtype is OutputDtype.FP16 and not self.mixed
        self.layout = manifest.layout
        self.weights_host = [torch.empty(0, dtype=torch.uint8)]
        self.tbe = TbeCall(
            [Segment(table.dtype, table.dim, offsets[table.name]) for table in tables],
            Pooling.MEAN if poolings == {Pooling.MEAN} else Pooling.SUM,
            WeightDtype.FP16 if half else WeightDtype.FP32,
            manifest.plan.row_alignment,
        )
        self.finish = Finish(manifest)

    def forward(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
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
        pooled: Tensor = self.tbe(self.weights_host[0], values, offsets, per_sample_weights, features)
        return self.finish(pooled, offsets, features) if self.mixed else pooled


def build_program(manifest: Manifest) -> nn.Module:
    """The lookup of `manifest`, not yet compiled: `OneRankProgram` where nothing is cut or copied."""
    whole = len(manifest.plan.ranks) == 1 and len(manifest.plan.shards) == len(manifest.tables)
    return (OneRankProgram(manifest) if whole else ShardedProgram(manifest)).eval()


def compile_program(manifest: Manifest) -> torch.jit.ScriptModule:
    """The lookup of `manifest` as TorchScript."""
    with torchscript():
        program: torch.jit.ScriptModule = torch.jit.script(build_program(manifest))
    return program


def save_program(program: torch.jit.ScriptModule, path: Path) -> None:
    """Write `program`, without the weights it may be using."""
    weights = program.weights_host
    program.weights_host = [torch.empty(0, dtype=torch.uint8) for _ in weights]
    try:
        path.write_bytes(program.save_to_buffer())  # torch takes no path that is not UTF-8
    finally:
        program.weights_host = weights
