"""A manifest becomes a lookup: a module of PyTorch, which TorchScript can compile."""

from torch import nn

from serving.bundle.manifest import Manifest
from serving.lookup.one_rank_program import OneRankProgram
from serving.lookup.sharded_program import ShardedProgram


def build_program(manifest: Manifest) -> nn.Module:
    """The lookup of `manifest`. Its `weights_host` has to be set, and FBGEMM's libraries have to be loaded.

    It is a `OneRankProgram` where there is one rank and no table is cut, else a `ShardedProgram`.
    """
    whole = len(manifest.plan.ranks) == 1 and len(manifest.plan.shards) == len(manifest.tables)
    return (OneRankProgram(manifest) if whole else ShardedProgram(manifest)).eval()
