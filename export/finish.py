"""What is left to do once sums are there: divide the means, round to the output's dtype."""

import math

import torch
from torch import Tensor, nn

from serving.bundle import Manifest, OutputDtype, Pooling


class Finish(nn.Module):
    """Multiply MEAN features by 1/count, as FBGEMM's kernel itself does, and round once.

    Args:
        manifest: features and tables.
    """

    is_mean: Tensor
    dims: Tensor

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        tables = manifest.feature_tables
        dims = [table.dim for table in tables]
        is_mean = [table.pooling is Pooling.MEAN for table in tables]
        self.register_buffer("is_mean", torch.tensor(is_mean))
        self.register_buffer("dims", torch.tensor(dims))
        self.divides = any(is_mean)
        self.rounds_to_half = manifest.output_dtype is OutputDtype.FP16
        # Columns come in runs of this many that belong to one feature, whatever the features asked for.
        self.run = math.gcd(*dims)

    def forward(self, sums: Tensor, offsets: Tensor, features: Tensor | None) -> Tensor:
        """Finish `sums` FP32 [B, D], which it may overwrite; `offsets` and `features` are the request's."""
        if self.divides:
            is_mean, dims = self.is_mean, self.dims
            if features is not None:
                is_mean, dims = is_mean.index_select(0, features), dims.index_select(0, features)
            counts = torch.diff(offsets).view(is_mean.size(0), sums.size(0))
            scale = torch.where(is_mean.unsqueeze(1), 1.0 / counts.clamp(min=1), 1.0)
            by_run = torch.repeat_interleave(scale, dims // self.run, dim=0)
            runs = sums.view(sums.size(0), by_run.size(0), self.run)
            runs.mul_(by_run.t().unsqueeze(2))
        return sums.half() if self.rounds_to_half else sums
