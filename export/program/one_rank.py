"""A lookup on one rank: all tables whole, one TBE call."""

import torch
from torch import Tensor, nn

from export.program.means import SumsToAnswer
from export.program.tbe_call import Segment, TbeCall
from serving.bundle.manifest import Manifest
from serving.bundle.rows import WeightDtype
from serving.bundle.tables import OutputDtype, Pooling


class OneRankProgram(nn.Module):
    """All tables whole on one rank: exactly one TBE call, no split and no merge.

    A TBE call pools either by SUM or by MEAN. Where a model has both, the call sums, and the means are divided
    afterwards. A table that is not pooled is asked for by bags of one id: they are its rows either way.

    Args:
        manifest: features, tables and plan. Its parity and files are not read.

    Attributes:
        weights_host: one tensor, uint8, the bytes of the rank. It is empty until the engine sets it.
        layout: `Manifest.layout` of the manifest that this was compiled for.
    """

    weights_host: list[Tensor]

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        offsets = {shard.table: shard.offset_bytes for shard in manifest.plan.shards}
        tables = manifest.feature_tables
        poolings = {table.pooling for table in tables} - {Pooling.NONE}
        self.mixed = len(poolings) > 1
        # Where means are divided afterwards, the call answers FP32, which is rounded once.
        half = manifest.output_dtype is OutputDtype.FP16 and not self.mixed
        self.layout = manifest.layout
        self.weights_host = [torch.empty(0, dtype=torch.uint8)]
        self.tbe = TbeCall(
            [Segment(table.dtype, table.dim, offsets[table.name]) for table in tables],
            Pooling.MEAN if poolings == {Pooling.MEAN} else Pooling.SUM,
            WeightDtype.FP16 if half else WeightDtype.FP32,
            manifest.plan.row_alignment,
        )
        self.to_answer = SumsToAnswer(manifest)

    def forward(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
    ) -> Tensor:
        """Look up and pool.

        Args:
            values: int64 [N], the ids, feature-major, each in [0, rows).
            offsets: int64 [F·B + 1], where each bag starts in `values`; the last is N.
            per_sample_weights: float32 [N], or None.
            features: int64 [F], positions in the manifest of the features asked for. None: all, in its order.

        Returns:
            [B, D], float32 or float16.
        """
        pooled: Tensor = self.tbe(self.weights_host[0], values, offsets, per_sample_weights, features)
        return self.to_answer(pooled, offsets, features) if self.mixed else pooled
