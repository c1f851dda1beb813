"""Bundles whose dense part is written by hand: what serving takes, whatever an export makes of models."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from serving.bundle.load import open_bundle
from serving.bundle.manifest import FileDigest, write_manifest
from serving.bundle.scores import SCORES, DenseDtype, DenseInput, DensePart, ScoreOutput, ScoreParity
from serving.model.config_file import CONFIG, model_config, read_config, settings_of
from serving.torchscript import torchscript

EXACT = ScoreParity(scale=1.0, scripted=0.0, merged=0.0)


def with_dense_part(
    bundle: Path,
    program: nn.Module,
    inputs: Sequence[DenseInput],
    outputs: Mapping[str, tuple[int, ...]],
    change: Callable[[DensePart], DensePart] = lambda part: part,
) -> Path:
    """Give a bundle without scores a dense part.

    Args:
        bundle: the bundle, which is changed.
        program: its forward takes embeddings [B, D], the dense inputs and the jagged inputs, and returns a tuple. It
            can be scripted.
        inputs: beside the embeddings.
        outputs: the shape of each, of one sample.
        change: what else is to be said of the dense part.
    """
    part = DensePart(
        inputs=tuple(inputs),
        outputs=tuple(ScoreOutput(name, shape, EXACT) for name, shape in outputs.items()),
        dtype=DenseDtype.FP32,
        mixes_samples=False,
    )
    with torchscript():
        content = torch.jit.freeze(torch.jit.script(program.eval())).save_to_buffer()
    (bundle / SCORES).write_bytes(content)
    digest = FileDigest(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    manifest = open_bundle(bundle).manifest
    files = {**manifest.files, SCORES: digest}
    manifest = msgspec.structs.replace(manifest, dense_part=change(part), files=files, left_out=())
    write_manifest(bundle, manifest)
    model = bundle.parent
    (model / CONFIG).write_text(model_config(model.name, manifest, settings_of(read_config(model))))
    return bundle
