"""Build the lookup of a manifest: a PyTorch module, which TorchScript can compile."""

from torch import nn

from serving.bundle.manifest import Manifest
from serving.lookup.one_rank_program import OneRankProgram
from serving.lookup.sharded_program import ShardedProgram


def build_program(manifest: Manifest) -> nn.Module:
    """The lookup of a manifest. Set its `weights_host` and load FBGEMM's libraries before calling it.

    It is a `OneRankProgram` for a single rank with whole tables, or else a `ShardedProgram`.
    """
    whole = len(manifest.plan.ranks) == 1 and len(manifest.plan.shards) == len(manifest.tables)
    return (OneRankProgram(manifest) if whole else ShardedProgram(manifest)).eval()
