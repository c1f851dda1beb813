"""Answer a probe from a bundle, with nothing imported but `serving`. `export.parity.probe` runs this as a script.

Usage: reload.py BUNDLE FOLDER. It reads FOLDER/probe.npz and writes FOLDER/outputs.npz.
"""

import sys
from pathlib import Path

import numpy as np

from serving.engine import Engine
from serving.request.tensors import Tensors


def main(bundle: Path, folder: Path) -> None:
    """Answer `folder`/probe.npz from `bundle`, in `folder`/outputs.npz."""
    engine = Engine.open(bundle)
    probe = np.load(folder / "probe.npz", allow_pickle=False)
    tensors = Tensors(None, probe["values"], probe["lengths"], probe.get("weights"))
    np.savez(folder / "outputs.npz", **engine.outputs(tensors))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
