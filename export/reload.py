"""Answer a probe from a bundle in a process that has only `serving`: run by `export.parity`, as a script.

Usage: reload.py BUNDLE FOLDER, with FOLDER/probe.npz in and FOLDER/answer.npy out.
"""

import sys
from pathlib import Path

import numpy as np

from serving.engine import Engine
from serving.kjt import Tensors


def main(bundle: Path, folder: Path) -> None:
    """Answer `folder`/probe.npz."""
    engine = Engine.open(bundle)
    probe = np.load(folder / "probe.npz", allow_pickle=False)
    tensors = Tensors(None, probe["values"], probe["lengths"], probe.get("weights"))
    np.save(folder / "answer.npy", engine.answer(tensors), allow_pickle=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
