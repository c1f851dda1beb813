"""A manifest becomes TorchScript: the lookup, compiled for one set of tables, without their weights.

This is the one file that knows how a program is compiled and saved.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from export.program.sharded import ShardedProgram
from export.program.tbe_call import Segment, SumsToAnswer, TbeCall
from serving.bundle.load import digest_file
from serving.bundle.manifest import MANIFEST, MODEL, PROGRAM, FileDigest, Manifest
from serving.bundle.tables import OutputDtype, Pooling
from serving.model.config_file import model_py
from serving.torchscript import torchscript


class OneRankProgram(nn.Module):
    """All tables whole on one rank: exactly one TBE call, no split and no merge.

    A TBE call pools either by SUM or by MEAN. Where a model has both, the call sums, and the means are divided
    afterwards. A table that is not pooled is asked for by bags of one id: they are its rows either way.

    Args:
        manifest: features, tables and plan. Its parity and files are not read.

    Attributes:
        weights_host: one tensor, uint8, the bytes of the rank. It is empty until the engine sets it.
        placement_digest: `Manifest.placement_digest` of the manifest that this was compiled for.
    """

    weights_host: list[Tensor]

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        offsets = {shard.table: shard.offset_bytes for shard in manifest.plan.shards}
        tables = manifest.feature_tables
        poolings = {table.pooling for table in tables} - {Pooling.NONE}
        self.mixed = len(poolings) > 1
        # Where means are divided afterwards, the call answers FP32, which is rounded once.
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
            offsets: int64 [F·B + 1], where each bag starts in `values`; the last is N.
            per_sample_weights: float32 [N], or None.
            features: int64 [F], positions in the manifest of the features asked for. None: all, in its order.

        Returns:
            [B, D], float32 or float16.
        """
        pooled: Tensor = self.tbe(self.weights_host[0], values, offsets, per_sample_weights, features)
        return self.to_answer(pooled, offsets, features) if self.mixed else pooled


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


def write_program(
    directory: Path, manifest: Manifest, program: torch.jit.ScriptModule, known_digests: Mapping[str, FileDigest]
) -> Manifest:
    """Write the program of a bundle, and what Triton starts it with.

    Args:
        directory: of the bundle. All its other files are there, but for its manifest.
        manifest: of the bundle.
        program: the compiled program.
        known_digests: of files that need not be read again, by name.

    Returns:
        `manifest` with the digests of all files. It is not written.
    """
    (directory / MODEL).write_text(model_py())
    save_program(program, directory / PROGRAM)
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    files = {name: known_digests.get(name) or digest_file(directory / name) for name in names}
    return msgspec.structs.replace(manifest, files=files)
