"""Answer probes from bundles, with nothing imported but `serving`. `export.parity.fresh_process` runs this script.

Each line of its input is JSON: [BUNDLE, FOLDER], or [FILE, FOLDER, FORMAT] for a file with a dense part. It reads
FOLDER/probe.npz, writes FOLDER/outputs.npz, and prints "answered". It ends where its input does: with the export.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.bundle.scores import DenseFormat
from serving.engine import Engine
from serving.errors import BundleError
from serving.lookup.dense_files import load_dense_file
from serving.lookup.program import load_fbgemm
from serving.requests.types import Tensors
from serving.torchscript import torchscript_error


def main(bundle: Path, folder: Path) -> None:
    """Answer `folder`/probe.npz from `bundle`, in `folder`/outputs.npz.

    Raises:
        BundleError: as `Engine.open`; or its program cannot be loaded, though TorchScript works.
    """
    engine = Engine.open(bundle)
    failure = engine.lookup_program.failure
    if failure is not None and torchscript_error() is None:  # a server would build the program from the manifest
        raise BundleError(failure)
    probe = np.load(folder / "probe.npz", allow_pickle=False)
    tensors = Tensors(None, probe["values"], probe["lengths"], probe.get("weights"))
    np.savez(folder / "outputs.npz", **dict[str, Any](engine.outputs(tensors)))


def score(file: Path, folder: Path, format_: str) -> None:
    """Run the dense part in `file` on the arrays in `folder`/probe.npz, in `folder`/outputs.npz."""
    load_fbgemm()
    forward = load_dense_file(DenseFormat(format_), file.read_bytes())
    probe = np.load(folder / "probe.npz", allow_pickle=False)
    with torch.inference_mode():
        outputs = forward(*(torch.from_numpy(probe[name]) for name in probe.files))
    np.savez(folder / "outputs.npz", *(tensor.numpy() for tensor in outputs))


if __name__ == "__main__":
    for line in sys.stdin:
        path, folder, *format_of_scores = json.loads(line)
        (score if format_of_scores else main)(Path(path), Path(folder), *format_of_scores)
        print("answered", flush=True)
