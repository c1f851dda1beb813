"""The lookup of a bundle whose tables are whole and on one rank: a program around one TBE call."""

import torch
from torch import Tensor, nn

from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype, Pooling
from serving.lookup.tbe_call import Segment, SumsToAnswer, TbeCall


class OneRankProgram(nn.Module):
    """The lookup of whole tables on one rank: one TBE call, without splitting and merging.

    A TBE call pools either by SUM or by MEAN. If a model has both, the call sums, and the means are divided
    afterwards. The rows of a table that is not pooled are bags of one id, for which SUM and MEAN are the same.

    Args:
        manifest: the features, tables and plan. Its parity and files are not read.

    Attributes:
        weights_host: a list of one tensor, uint8, the bytes of the rank. It is empty until the engine sets it.
        placement_digest: `Manifest.placement_digest` of the manifest that this was compiled for.
    """

    weights_host: list[Tensor]

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        offsets = {shard.table: shard.offset_bytes for shard in manifest.plan.shards}
        tables = manifest.feature_tables
        poolings = {table.pooling for table in tables} - {Pooling.NONE}
        self.mixed = len(poolings) > 1
        # If means are divided afterwards, the call returns FP32, which is rounded once.
        output_dtype = OutputDtype.FP32 if self.mixed else manifest.output_dtype
        self.placement_digest = manifest.placement_digest
        self.weights_host = [torch.empty(0, dtype=torch.uint8)]
        self.tbe = TbeCall(
            [Segment(table.dtype, table.dim, offsets[table.name]) for table in tables],
            Pooling.MEAN if poolings == {Pooling.MEAN} else Pooling.SUM,
            output_dtype,
            manifest.plan.row_alignment,
        )
        self.to_answer = SumsToAnswer(manifest)

    def forward(
        self, values: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, features: Tensor | None
    ) -> Tensor:
        """Look up and pool.

        Args:
            values: int64 [N], the ids, feature-major, each in [0, rows).
            offsets: int64 [F·B + 1], the start of each bag in `values`; the last is N.
            per_sample_weights: float32 [N], or None.
            features: int64 [F], the positions of the requested features in the manifest, or None for all features.

        Returns:
            [B, D], float32 or float16.
        """
        pooled: Tensor = self.tbe.forward(self.weights_host[0], values, offsets, per_sample_weights, features)
        return self.to_answer.forward(pooled, offsets, features) if self.mixed else pooled
