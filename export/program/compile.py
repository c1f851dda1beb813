"""A manifest becomes TorchScript: the lookup, compiled for one set of tables, without their weights.

This is the one file that knows how a program is compiled and saved.
"""

from pathlib import Path

import torch
from torch import nn

from export.program.one_rank import OneRankProgram
from export.program.sharded import ShardedProgram
from serving.bundle.manifest import Manifest
from serving.ranks.program import torchscript


def build_program(manifest: Manifest) -> nn.Module:
    """The lookup of `manifest`, not yet compiled.

    It is a `OneRankProgram` where there is one rank and no table is cut, else a `ShardedProgram`.
    """
    whole = len(manifest.plan.ranks) == 1 and len(manifest.plan.shards) == len(manifest.tables)
    return (OneRankProgram(manifest) if whole else ShardedProgram(manifest)).eval()


def compile_program(manifest: Manifest) -> torch.jit.ScriptModule:
    """The lookup of `manifest` as TorchScript."""
    with torchscript():
        program: torch.jit.ScriptModule = torch.jit.script(build_program(manifest))
    return program


def save_program(program: torch.jit.ScriptModule, path: Path) -> None:
    """Write `program` to `path`, without the weights that it may be using."""
    weights = program.weights_host
    program.weights_host = [torch.empty(0, dtype=torch.uint8) for _ in weights]
    try:
        path.write_bytes(program.save_to_buffer())  # torch takes no path that is not UTF-8
    finally:
        program.weights_host = weights
