"""The last step of a lookup: sums become means where those are wanted, and are rounded to the output's dtype."""

import math

import torch
from torch import Tensor, nn

from serving.bundle.manifest import Manifest
from serving.bundle.tables import OutputDtype, Pooling


class SumsToAnswer(nn.Module):
    """Multiplies MEAN features by 1/count, as FBGEMM's kernel itself does, and rounds once.

    Args:
        manifest: features and tables.

    Attributes:
        is_mean: bool, whether a feature is a mean [features of the model].
        dims: int64, width of a feature in the answer [features of the model].
        tile: columns of a tile. Each tile of an answer belongs to one feature, whatever the features asked for.
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
        self.tile = math.gcd(*dims)

    def forward(self, sums: Tensor, offsets: Tensor, features: Tensor | None) -> Tensor:
        """The answer that `sums` become.

        Args:
            sums: float32 [B, D]; may be overwritten.
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
